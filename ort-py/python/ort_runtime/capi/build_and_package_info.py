"""What the package was built as."""

package_name = "ort-runtime"
cuda_version = ""
