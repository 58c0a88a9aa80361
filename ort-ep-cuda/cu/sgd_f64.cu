// Stochastic gradient descent for parameters of float64.
#include "sgd.cuh"

SGD(f64, double)
