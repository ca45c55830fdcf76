// Row kernels for AVX2 with FMA. Compiled with the flags of the instruction set, so it includes nothing else.
#define QWEN_ROWS_NAME avx2
#define QWEN_ROWS_WIDTH 8
#include "rows_impl.h"
