"""A request on its way to the engine and back: prompts, parameters, media, and answers. Most modules import vLLM."""
