import psutil
import os

def profile_memory(session, input_data, input_name):
    """Profile memory usage during inference."""
    process = psutil.Process(os.getpid())

    # Baseline memory
    baseline = process.memory_info().rss / 1024 / 1024  # MB

    # Run inference
    for _ in range(100):
        session.run(None, {input_name: input_data})

    # Peak memory
    peak = process.memory_info().rss / 1024 / 1024

    print(f"Baseline: {baseline:.2f} MB")
    print(f"Peak: {peak:.2f} MB")
    print(f"Increase: {peak - baseline:.2f} MB")
