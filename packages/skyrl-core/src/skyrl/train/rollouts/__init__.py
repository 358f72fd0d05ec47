"""Where rollouts come from during a run: servers, their versions, and how far their logprobs lie from ours."""
