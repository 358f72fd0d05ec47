"""vLLM behind the server kit's Engine contract; the one home of `import vllm`."""
