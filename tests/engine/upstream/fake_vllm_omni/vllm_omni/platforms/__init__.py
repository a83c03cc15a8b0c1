class _Cpu:
    device_type = "cpu"


current_omni_platform = _Cpu()
