"""Model files of Ray: RayLLM's YAML and the LLMConfig of Ray Serve LLM, as keys of serving.properties.

`read.read_model_file` is the entry. Ray itself is not needed.
"""
