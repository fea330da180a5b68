"""First on the path of a Python and its child processes: lets vLLM's CPU build use its second model runner.

That runner needs Triton kernels, whose wheel has no CPU backend, so vLLM disables it. Triton's interpreter runs them in
NumPy: vLLM is told of a backend, and that there is no configuration to try out.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from types import SimpleNamespace

    import triton.backends
    import triton.runtime.autotuner

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    triton.runtime.autotuner.Autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]
