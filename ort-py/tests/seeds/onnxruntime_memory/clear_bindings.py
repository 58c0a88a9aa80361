    io_binding.clear_binding_inputs()
    io_binding.clear_binding_outputs()
