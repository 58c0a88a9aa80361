session_options.enable_mem_pattern = True
session_options.enable_cpu_mem_arena = True
