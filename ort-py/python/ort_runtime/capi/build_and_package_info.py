"""What the package was built as."""

from .onnxruntime_pybind11_state import get_version_string

package_name = "ort-runtime"
# The version of onnxruntime whose interface the package has.
__version__ = get_version_string()
cuda_version = ""
