"""Ray Serve: what one deployment of a model is, and how a cluster runs it; Ray itself is imported by few modules.

`deployments`, `recommendation` and what they import need no Ray. `autoscaling` and `serve_config` are
named in files that users keep.
"""
