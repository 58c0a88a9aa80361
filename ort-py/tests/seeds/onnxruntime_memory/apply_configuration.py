# Run training with configuration
model = ORTModule(build_model())
# Memory optimizer will use specified config
