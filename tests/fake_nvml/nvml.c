/*
 * A libnvidia-ml.so.1 whose answers stand in a text file, so that the real pynvml can be tested without a GPU.
 *
 * The environment variable FAKE_NVML_SCRIPT names the file. It is read again at every call, so a test changes the machine by
 * replacing the file. Each line is `KEY VALUE`, where the value may also be `error N` with an NVML error code:
 *
 *   init ok                         nvmlInit; 12 (library not found) if this line is missing
 *   shutdown ok                     nvmlShutdown; an error leaves the session open
 *   driver HEX                      driver version, as the hexadecimal digits of its bytes
 *   count N                         number of devices
 *   devices ok                      every call for one device
 *   hang SECONDS                    a memory call waits this long, or until the line is gone
 *   I.handle ok                     nvmlDeviceGetHandleByIndex_v2 of device I
 *   I.uuid HEX, I.name HEX          bytes, valid UTF-8 or not
 *   I.memory_v1 TOTAL FREE USED
 *   I.memory_v2 TOTAL RESERVED FREE USED
 *
 * A figure without a line is answered with 3 (not supported).
 */
#define _POSIX_C_SOURCE 200809L
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    INSUFFICIENT_SIZE = 7,
    LIBRARY_NOT_FOUND = 12,
    ARGUMENT_VERSION_MISMATCH = 25,
    MAX_DEVICES = 64,
    LINE = 1024,
};

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};

#define MEMORY_V2_VERSION ((unsigned int)sizeof(struct memory_v2) | 2u << 24)

/* For tests: how often nvmlInit was called, and how many sessions are open. */
int fake_nvml_init_calls;
int fake_nvml_sessions;

/* A handle is the address of its element; nothing is stored there. */
static char devices[MAX_DEVICES];

/* Returns the error code scripted for `key`, `missing` if it has no line; `value` (LINE bytes) gets the rest of the line. */
static int answer(const char *key, int missing, char *value)
{
    const char *path = getenv("FAKE_NVML_SCRIPT");
    FILE *script = path ? fopen(path, "r") : NULL;
    size_t length = strlen(key);
    char line[LINE];
    int code = missing;

    value[0] = '\0';
    while (script && fgets(line, sizeof line, script)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, key, length) == 0 && line[length] == ' ') {
            strcpy(value, line + length + 1);
            if (sscanf(value, "error %d", &code) != 1)
                code = OK;
            break;
        }
    }
    if (script)
        fclose(script);
    return code;
}

static int device_answer(const void *handle, const char *what, char *value)
{
    ptrdiff_t index = (const char *)handle - devices;
    char key[64];
    int code;

    if (fake_nvml_sessions == 0)
        return UNINITIALIZED;
    if (index < 0 || index >= MAX_DEVICES)
        return INVALID_ARGUMENT;
    code = answer("devices", OK, value);
    if (code != OK)
        return code;
    snprintf(key, sizeof key, "%d.%s", (int)index, what);
    return answer(key, NOT_SUPPORTED, value);
}

static int copy_hex(const char *hex, char *text, unsigned int size)
{
    size_t length = strlen(hex) / 2;

    if (length >= size)
        return INSUFFICIENT_SIZE;
    for (size_t i = 0; i < length; i++) {
        unsigned int byte = 0;
        sscanf(hex + 2 * i, "%2x", &byte);
        text[i] = (char)byte;
    }
    text[length] = '\0';
    return OK;
}

/* Waits in short steps, so that a test can end the wait by taking the line out of the script. */
static void hang(void)
{
    const struct timespec step = {0, 10 * 1000 * 1000};
    char value[LINE];

    for (double waited = 0; answer("hang", NOT_SUPPORTED, value) == OK && waited < atof(value); waited += 0.01)
        nanosleep(&step, NULL);
}

int nvmlInitWithFlags(unsigned int flags)
{
    char value[LINE];
    int code = answer("init", LIBRARY_NOT_FOUND, value);

    (void)flags;
    fake_nvml_init_calls++;
    if (code == OK)
        fake_nvml_sessions++;
    return code;
}

int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

int nvmlShutdown(void)
{
    char value[LINE];
    int code = answer("shutdown", OK, value);

    if (fake_nvml_sessions == 0)
        return UNINITIALIZED;
    if (code == OK)
        fake_nvml_sessions--;
    return code;
}

const char *nvmlErrorString(int code)
{
    static char text[64];

    snprintf(text, sizeof text, "Fake error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    char value[LINE];
    int code = answer("driver", NOT_SUPPORTED, value);

    if (fake_nvml_sessions == 0)
        return UNINITIALIZED;
    return code != OK ? code : copy_hex(value, version, size);
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    char value[LINE];
    int code = answer("count", NOT_SUPPORTED, value);

    if (fake_nvml_sessions == 0)
        return UNINITIALIZED;
    if (code == OK)
        *count = (unsigned int)atoi(value);
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    char value[LINE];

    if (index >= MAX_DEVICES)
        return INVALID_ARGUMENT;
    *handle = &devices[index];
    return device_answer(*handle, "handle", value);
}

int nvmlDeviceGetIndex(void *handle, unsigned int *index)
{
    char value[LINE];
    int code = device_answer(handle, "handle", value);

    if (code == OK)
        *index = (unsigned int)((char *)handle - devices);
    return code;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned int size)
{
    char value[LINE];
    int code = device_answer(handle, "uuid", value);

    return code != OK ? code : copy_hex(value, uuid, size);
}

int nvmlDeviceGetName(void *handle, char *name, unsigned int size)
{
    char value[LINE];
    int code = device_answer(handle, "name", value);

    return code != OK ? code : copy_hex(value, name, size);
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory)
{
    char value[LINE];
    int code;

    hang();
    code = device_answer(handle, "memory_v1", value);
    if (code == OK)
        sscanf(value, "%llu %llu %llu", &memory->total, &memory->free, &memory->used);
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    char value[LINE];
    int code;

    if (memory->version != MEMORY_V2_VERSION)
        return ARGUMENT_VERSION_MISMATCH;
    hang();
    code = device_answer(handle, "memory_v2", value);
    if (code == OK)
        sscanf(value, "%llu %llu %llu %llu", &memory->total, &memory->reserved, &memory->free, &memory->used);
    return code;
}
