def pytest_configure(config):
    config.addinivalue_line("markers", "engines: needs vllm or sglang (tools/test_engines.sh); skipped without")
