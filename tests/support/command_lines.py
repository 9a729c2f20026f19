"""Command lines of other servers, as people write them: each with keys that must come out, by engine."""

from __future__ import annotations

VLLM = [
    ("vllm serve Qwen/Qwen2.5-7B-Instruct", {"option.model_id": "Qwen/Qwen2.5-7B-Instruct"}),
    (
        "vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 4 --max-model-len 16384"
        " --gpu-memory-utilization 0.92 --port 8001",
        {
            "option.tensor_parallel_degree": "4",
            "option.max_model_len": "16384",
            "option.gpu_memory_utilization": "0.92",
            "option.rolling_batch": "vllm",
        },
    ),
    (
        "CUDA_VISIBLE_DEVICES=0,1 python3 -m vllm.entrypoints.openai.api_server --model mistralai/Mistral-7B-v0.1 "
        "--dtype half --served-model-name mistral chat --max-num-seqs 64 --disable-log-requests",
        {
            "option.model_id": "mistralai/Mistral-7B-v0.1",
            "option.dtype": "fp16",
            "option.served_model_name": "mistral,chat",
            "option.max_rolling_batch_size": "64",
        },
    ),
    (
        "vllm serve TheBloke/Llama-2-7B-AWQ -q awq -tp 2",
        {"option.quantize": "awq", "option.tensor_parallel_degree": "2"},
    ),
    (
        "vllm serve --enforce-eager --trust-remote-code microsoft/phi-4 --max_model_len=4k",
        {
            "option.model_id": "microsoft/phi-4",
            "option.enforce_eager": "true",
            "option.trust_remote_code": "true",
            "option.max_model_len": "4000",
        },
    ),
    (
        "vllm serve Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3",
        {"option.enable_auto_tool_choice": "true", "option.tool_call_parser": "hermes"},
    ),
    (
        "vllm serve google/gemma-2-9b-it --no-enable-prefix-caching --max-num-batched-tokens 8K --seed 7",
        {
            "option.enable_prefix_caching": "false",
            "option.max_rolling_batch_prefill_tokens": "8192",
            "option.seed": "7",
        },
    ),
    (
        'vllm serve facebook/opt-125m --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
        {"option.speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'},
    ),
    (
        "vllm serve facebook/opt-125m --speculative-config.method ngram --speculative-config.num_speculative_tokens 4",
        {"option.speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'},
    ),
    (
        "vllm serve meta-llama/Llama-2-7b-hf --enable-lora --lora-modules sql=/a/sql --max-loras 2 --max-lora-rank 32",
        {"option.enable_lora": "true", "option.max_loras": "2", "option.max_lora_rank": "32"},
    ),
    (
        "vllm serve Qwen/Qwen2-VL-2B-Instruct --limit-mm-per-prompt '{\"image\": 2}'",
        {"option.limit_mm_per_prompt": '{"image": 2}'},
    ),
    ("vllm serve facebook/opt-125m -dp 2", {"minWorkers": "2", "maxWorkers": "2"}),
    ("nohup vllm serve facebook/opt-125m --kv-cache-dtype fp8 > log.txt 2>&1 &", {"option.kv_cache_dtype": "fp8"}),
    (
        "docker run --runtime nvidia --gpus all -v ~/.cache/huggingface:/cache/huggingface"
        ' --env "HUGGING_FACE_HUB_TOKEN=hf_abcdefghijklmnopqrstuvwx" -p 8000:8000 --ipc=host'
        " vllm/vllm-openai:latest --model mistralai/Mistral-7B-Instruct-v0.3 --max-model-len 8192",
        {"option.model_id": "mistralai/Mistral-7B-Instruct-v0.3", "option.max_model_len": "8192"},
    ),
    (
        "podman run --rm -it --device nvidia.com/gpu=all --shm-size=4GB -p 8000:8000 --env HF_HUB_OFFLINE=0"
        " registry.example.com/rhaiis/vllm-cuda-rhel9:3.2 --model RedHatAI/Llama-3.2-1B-Instruct-FP8",
        {"option.model_id": "RedHatAI/Llama-3.2-1B-Instruct-FP8"},
    ),
    (
        "sudo docker run --gpus '\"device=0\"' --entrypoint bash vllm/vllm-openai:v0.9.0 -c"
        " 'vllm serve facebook/opt-125m --max-model-len 1024'",
        {"option.model_id": "facebook/opt-125m", "option.max_model_len": "1024"},
    ),
    (
        "#!/bin/bash\n# serve\nexport VLLM_ATTENTION_BACKEND=FLASHINFER\nVLLM_USE_V1=1 vllm serve \\\n"
        "  facebook/opt-125m \\\n  --block-size 32\n",
        {"option.env": "VLLM_ATTENTION_BACKEND=FLASHINFER,VLLM_USE_V1=1", "option.block_size": "32"},
    ),
]
SGLANG = [
    (
        "python3 -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B-Instruct --host 0.0.0.0 --port 30000",
        {"option.model_id": "meta-llama/Meta-Llama-3-8B-Instruct"},
    ),
    (
        "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B --tp 2 --mem-fraction-static 0.7",
        {"option.tensor_parallel_degree": "2", "option.mem_fraction_static": "0.7"},
    ),
    (
        "python -m sglang.launch_server --model Qwen/Qwen2.5-7B-Instruct --chunked-prefill-size 4096"
        " --max-running-requests 128 --schedule-conservativeness 0.3 --schedule-policy fcfs",
        {
            "option.chunked_prefill_size": "4096",
            "option.max_running_requests": "128",
            "option.schedule_conservativeness": "0.3",
            "option.schedule_policy": "fcfs",
        },
    ),
    (
        "sglang serve --model-path Qwen/Qwen3-8B --context-length 32768 --disable-cuda-graph --reasoning-parser qwen3",
        {"option.max_model_len": "32768", "option.enable_cuda_graph": "false"},
    ),
    (
        "docker run --gpus all --shm-size 32g -p 30000:30000 -v ~/.cache/huggingface:/cache/huggingface"
        " --env HF_TOKEN=hf_abcdefghijklmnopqrstuvwx --ipc=host lmsysorg/sglang:latest python3 -m sglang.launch_server"
        " --model-path meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 --dp 2 --kv-cache-dtype fp8_e5m2",
        {"option.dtype": "bfloat16", "maxWorkers": "2", "option.kv_cache_dtype": "fp8"},
    ),
    (
        "python -m sglang.launch_server --model-path a/b --chunked-prefill-size -1 --trust-remote-code",
        {"option.trust_remote_code": "true"},
    ),
]
TGI = [
    (
        "text-generation-launcher --model-id tiiuae/falcon-7b-instruct --num-shard 2 --port 8080",
        {"option.model_id": "tiiuae/falcon-7b-instruct", "option.tensor_parallel_degree": "2"},
    ),
    (
        "docker run --gpus all --shm-size 1g -p 8080:80 -v $PWD/data:/data"
        " ghcr.io/huggingface/text-generation-inference:3.3.5 --model-id teknium/OpenHermes-2.5-Mistral-7B"
        " --max-total-tokens 4096 --max-input-tokens 3072 --quantize bitsandbytes-nf4",
        {
            "option.model_id": "teknium/OpenHermes-2.5-Mistral-7B",
            "option.max_model_len": "4096",
            "option.quantize": "bitsandbytes4",
        },
    ),
    (
        "docker run -e MODEL_ID=bigscience/bloom-560m -e HF_TOKEN=hf_abcdefghijklmnopqrstuvwx"
        " ghcr.io/huggingface/text-generation-inference:latest",
        {"option.model_id": "bigscience/bloom-560m"},
    ),
    (
        "text-generation-launcher --model-id HuggingFaceH4/zephyr-7b-beta --speculate 3 --max-concurrent-requests 256"
        " --cuda-memory-fraction 0.8 --json-output --trust-remote-code",
        {
            "option.speculative_draft_model": "[ngram]",
            "option.speculative_length": "3",
            "job_queue_size": "256",
        },
    ),
]
EVERY = [*VLLM, *SGLANG, *TGI]
