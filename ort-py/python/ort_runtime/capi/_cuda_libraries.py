"""Where the packages of NVIDIA keep their libraries. Programs that preload them ask for it.

The package has these names, private ones as in onnxruntime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .build_and_package_info import cuda_version

if TYPE_CHECKING:
    from pathlib import Path

_CUDNN_PARTS = (
    "_engines_runtime_compiled",
    "_engines_precompiled",
    "_heuristic",
    "_ops",
    "_adv",
    "_graph",
    "",
    "_engines_tensor_ir",
)


def _extract_cuda_major_version(version_str: str) -> str:
    """Returns the part of a version before the first dot; of none it is that of CUDA 12."""
    return version_str.partition(".")[0] if version_str else "12"


def _get_cufft_version(cuda_major_version: str) -> str:
    """Returns the version of cuFFT that is part of a version of CUDA."""
    return "12" if int(cuda_major_version) > 12 else "11"


def _get_nvidia_dll_paths(
    is_windows: bool, cuda: bool = True, cudnn: bool = True
) -> list[tuple[str, str, str, str]]:
    """Returns the parts of the paths of CUDA's and cuDNN's libraries, from the folder of packages."""
    major = _extract_cuda_major_version(cuda_version)
    cufft = _get_cufft_version(major)
    if is_windows:
        of_cuda = [
            ("cublas", f"cublasLt64_{major}.dll"),
            ("cublas", f"cublas64_{major}.dll"),
            ("cufft", f"cufft64_{cufft}.dll"),
            ("cuda_runtime", f"cudart64_{major}.dll"),
        ]
        of_cudnn = [("cudnn", f"cudnn{part}64_9.dll") for part in _CUDNN_PARTS]
    else:
        of_cuda = [
            ("cublas", f"libcublasLt.so.{major}"),
            ("cublas", f"libcublas.so.{major}"),
            ("cuda_nvrtc", f"libnvrtc.so.{major}"),
            ("curand", "libcurand.so.10"),
            ("cufft", f"libcufft.so.{cufft}"),
            ("cuda_runtime", f"libcudart.so.{major}"),
        ]
        of_cudnn = [("cudnn", "libcudnn.so.9")]
    wanted = (of_cuda if cuda else []) + (of_cudnn if cudnn else [])
    folder = "bin" if is_windows else "lib"
    return [("nvidia", package, folder, name) for package, name in wanted]


def _get_package_version(package_name: str) -> str | None:
    """Returns the version of an installed package, None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package_name)
    except metadata.PackageNotFoundError:
        return None


def _get_package_root(package_name: str, directory_name: str | None = None) -> Path | None:
    """Returns the folder of an installed package, None if it has no such folder."""
    # The import takes a fifth of the package's.
    from importlib import metadata
    from pathlib import Path

    try:
        files = metadata.distribution(package_name).files or []
    except metadata.PackageNotFoundError:
        return None
    initial = (directory_name or package_name, "__init__.py")
    found = (file for file in files if file.parts == initial)
    return next((Path(str(file.locate())).parent for file in found), None)


def _get_cuda_plugin_ep_library_path() -> str | None:
    """Returns None: the CUDA provider is part of the native module."""
    return None


def _register_bundled_cuda_plugin_ep(warn_on_failure: bool = False) -> None:
    """Does nothing: the CUDA provider is part of the native module."""
