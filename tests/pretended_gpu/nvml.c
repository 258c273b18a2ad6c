// The three functions of NVIDIA's management library that count GPUs.
#include <stdlib.h>

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) {
    const char* said = getenv("PRETENDED_GPUS");
    *count = said ? (unsigned)atoi(said) : 1;
    return 0;
}
