import torch

def profile_gpu_memory(session, input_data, input_name):
    """Profile GPU memory usage."""
    torch.cuda.reset_peak_memory_stats()

    # Run inference
    session.run(None, {input_name: input_data})

    allocated = torch.cuda.memory_allocated() / 1024 / 1024  # MB
    peak = torch.cuda.max_memory_allocated() / 1024 / 1024

    print(f"Allocated: {allocated:.2f} MB")
    print(f"Peak: {peak:.2f} MB")
