"""Ray Serve: what one deployment of a model is, and how a cluster runs it; Ray itself is imported by few modules.

`deployment` and what describes it need no Ray.
"""
