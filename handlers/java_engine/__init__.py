"""DJL's engines that run in Java: options only, so that the error for such a configuration names the engine."""
