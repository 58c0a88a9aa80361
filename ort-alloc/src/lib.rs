//! Memory for ort-runtime: allocators, arenas, mapped files, the static planner and budgets.
