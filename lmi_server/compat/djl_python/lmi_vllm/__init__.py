"""LMI's service of vLLM. `option.entryPoint=djl_python.lmi_vllm.vllm_async_service` does not load it."""
