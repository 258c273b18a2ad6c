// The functions of NVIDIA's management library that count GPUs and tell the driver's version.
#include <stdlib.h>
#include <string.h>

static int said(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = (unsigned)said("PRETENDED_GPUS", 1);
    return 0;
}
int nvmlSystemGetDriverVersion(char* version, unsigned length) {
    strncpy(version, "535.104.05", length);
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = 12020;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    *device = (void*)(size_t)(index + 1);
    return 0;
}
// PRETENDED_SLICED: so many of the first GPUs are in MIG mode; the others know nothing of it
int nvmlDeviceGetMigMode(void* device, unsigned* mode, unsigned* pending) {
    if ((size_t)device > (size_t)said("PRETENDED_SLICED", 0)) return 3;
    *mode = *pending = 1;
    return 0;
}
