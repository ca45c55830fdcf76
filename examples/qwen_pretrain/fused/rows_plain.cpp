// Row kernels for any CPU, in vectors of four.
#define QWEN_ROWS_NAME plain
#define QWEN_ROWS_WIDTH 4
#include "rows_impl.h"
