"""What single execution providers need of quantized models."""
