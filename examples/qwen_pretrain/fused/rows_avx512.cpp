// Row kernels for AVX-512 (F, BW, DQ, VL). Compiled with the flags of the instruction set, so it includes nothing else.
#define QWEN_ROWS_NAME avx512
#define QWEN_ROWS_WIDTH 16
#include "rows_impl.h"
