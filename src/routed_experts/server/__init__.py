"""HTTP: the dialects of OpenAI, SGLang and vLLM over one engine. Needs routed-experts[serve]; knows the engine by its
doors."""
