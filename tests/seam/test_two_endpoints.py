"""One run over two servers, in clear on this machine and over TLS: `['grpc://host:port','grpcs://host2:port']`."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from skyrl_rollout.client import RolloutClient
from skyrl_rollout.reference.process import ReferenceServer
from skyrl_rollout.security import Credentials
from test_backends_agree import FIVE_STEPS
from training_run import ROOT, TrainingRun
from vllm_server import TINY_MODEL

STEPS = 2


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """(certificate, private key) of 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test")
    pem, key = tmp_path / "server.pem", tmp_path / "server.key"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=rollout"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(pem), "-keyout", str(key)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return pem, key


async def state(url: str, credentials: Credentials) -> tuple[int, int]:
    """(committed version, tokens generated so far) of a server."""
    async with await RolloutClient.connect(url, credentials=credentials) as client:
        return client.info.weight_version, (await client.status()).tokens_generated


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_both_servers_serve_the_run_and_end_at_its_version(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    pem, key = certificate
    model = ("--model", str(TINY_MODEL), "--logits", "canary")
    secured = ReferenceServer(*model, "--tls-certificate", str(pem), "--tls-key", str(key))
    with ReferenceServer(*model) as clear, secured:
        assert secured.url.startswith("grpcs://")
        urls = f"generator.inference_engine.external_server_urls=['{clear.url}','{secured.url}']"
        run = TrainingRun(tmp_path / "run", *FIVE_STEPS, f"trainer.max_training_steps={STEPS}", urls)
        run.start(PYTHONPATH=str(ROOT / "tests/seam"), GRPC_DEFAULT_SSL_ROOTS_FILE_PATH=str(pem))
        assert run.wait(200) == 0, run.output[-4000:]
        trusting = Credentials.from_files(roots=pem)
        for url in (clear.url, secured.url):
            version, tokens = asyncio.run(state(url, trusting))
            assert version == STEPS + 1, f"{url}: the first publish and one per step"
            assert tokens > 0, f"{url} took no part"
    assert sorted(run.steps()) == [1, 2]
