// Softmax and its like, by their numbers.
#pragma once

enum Function { SOFTMAX, LOG_SOFTMAX, HARDMAX, L1, L2 };
