/*
 * A libnvidia-ml.so.1 whose answers stand in a text file, so that the real pynvml can be tested without a GPU.
 *
 * The environment variable FAKE_NVML_SCRIPT names the file. It is looked at with every call and read again when it is another
 * one, so a test changes the machine by replacing the file. Each line is `KEY VALUE`, where the value may also be `error N` with
 * an NVML error code:
 *
 *   init ok                         nvmlInit; 12 (library not found) if this line is missing
 *   shutdown ok                     nvmlShutdown; an error leaves the session open
 *   driver HEX                      driver version, as the hexadecimal digits of its bytes
 *   count N                         number of devices
 *   devices ok                      every call for one device
 *   event_set ok, event_wait ok     nvmlEventSetCreate, nvmlEventSetWait_v2
 *   absent.FUNCTION error 13        this function, named with its version, is not in this driver
 *   hang.FUNCTION SECONDS           this function, named without a version, waits this long, or until the line is gone
 *
 * and for device D, which is an index, or INDEX/PLACE for a MIG instance:
 *
 *   D.hang.FUNCTION SECONDS
 *   D.handle ok                     nvmlDeviceGetHandleByIndex_v2, nvmlDeviceGetMigDeviceHandleByIndex
 *   D.uuid HEX, D.name HEX          bytes, valid UTF-8 or not
 *   D.memory_v1 TOTAL FREE USED
 *   D.memory_v2 TOTAL RESERVED FREE USED
 *   D.utilization GPU MEMORY        percent
 *   D.memory_clock MHZ, D.bus_width BITS, D.minor_number N
 *   D.throttle BITS, D.ecc COUNT
 *   D.compute PID:BYTES ..., D.graphics ..., D.mps ...     processes
 *   D.events ok                     nvmlDeviceRegisterEvents
 *   D.xids XID ...                  events of the file: each is delivered once to each event set
 *   D.mig MODE PLACES               1 for on; how many instances there could be
 *
 * A figure without a line is answered with 3 (not supported), a MIG instance without one with 6 (not found).
 * All calls may come from any thread.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    LIBRARY_NOT_FOUND = 12,
    ARGUMENT_VERSION_MISMATCH = 25,
    MEMORY = 20,
    MAX_DEVICES = 64,
    MAX_PLACES = 8,
    VALUE = 4096,
    KEY = 128,
    CLOCK_MEM = 2,
    UNCORRECTED = 1,
    VOLATILE = 0,
    XID_EVENT = 8,
};

struct memory {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned int version;
    unsigned long long total, reserved, free, used;
};

struct utilization {
    unsigned int gpu, memory;
};

struct process {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance, compute_instance;
};

struct event {
    void *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
};

/* Of each device, whether it is registered, and how many events of the file with number `version` were delivered. */
struct event_set {
    bool registered[MAX_DEVICES];
    int delivered[MAX_DEVICES];
    unsigned int version;
};

#define MEMORY_V2_VERSION ((unsigned int)sizeof(struct memory_v2) | 2u << 24)

/* For tests: how often nvmlInit was called, how many sessions and event sets are open, how many calls hang, calls by device. */
int fake_nvml_init_calls;
int fake_nvml_sessions;
int fake_nvml_event_sets;
int fake_nvml_hanging;
int fake_nvml_device_calls[MAX_DEVICES];

/* A handle is the address of an element: the first of a row is the device, the others its MIG instances. Nothing is stored. */
static char handles[MAX_DEVICES][1 + MAX_PLACES];

struct line {
    const char *key, *value;
};

/* The file as it was read last; `version` counts its changes. All of this, and the counters above, is for the holder of `lock`. */
static struct {
    char *text;
    struct line *lines;
    size_t count;
    struct stat file;
    unsigned int version;
    bool hangs, absences;
} script;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int compare_lines(const void *a, const void *b)
{
    return strcmp(((const struct line *)a)->key, ((const struct line *)b)->key);
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static void forget_script(void)
{
    free(script.text);
    free(script.lines);
    script.text = NULL;
    script.lines = NULL;
    script.count = 0;
    script.hangs = script.absences = false;
    memset(&script.file, 0, sizeof script.file);
    script.version++;
}

static void read_script(FILE *file)
{
    size_t size, space = 0;
    char *rest = NULL;

    forget_script();
    if (fstat(fileno(file), &script.file) != 0)
        return;
    size = (size_t)script.file.st_size;
    script.text = calloc(1, size + 1);
    if (!script.text || fread(script.text, 1, size, file) != size)
        abort();
    for (char *line = strtok_r(script.text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *value = strchr(line, ' ');

        if (!value)
            abort();
        *value++ = '\0';
        if (script.count == space) {
            space = space ? 2 * space : 64;
            script.lines = realloc(script.lines, space * sizeof *script.lines);
            if (!script.lines)
                abort();
        }
        script.lines[script.count++] = (struct line){line, value};
        script.hangs = script.hangs || strstr(line, "hang.");
        script.absences = script.absences || strncmp(line, "absent.", 7) == 0;
    }
    qsort(script.lines, script.count, sizeof *script.lines, compare_lines);
}

/* Takes the lock and makes sure that the script is the file as it is now. */
static void enter(void)
{
    const char *path = getenv("FAKE_NVML_SCRIPT");
    struct stat now;
    FILE *file;

    pthread_mutex_lock(&lock);
    if (!path || stat(path, &now) != 0) {
        forget_script();
    } else if (!same_file(&now, &script.file)) {
        file = fopen(path, "r");
        if (file) {
            read_script(file);
            fclose(file);
        }
    }
}

static void leave(void)
{
    pthread_mutex_unlock(&lock);
}

static const char *find(const char *key)
{
    struct line wanted = {key, NULL}, *found;

    found = script.count ? bsearch(&wanted, script.lines, script.count, sizeof wanted, compare_lines) : NULL;
    return found ? found->value : NULL;
}

/* Returns the error code scripted for `key`, `missing` if it has no line; `value` (VALUE bytes) gets what stands there. */
static int answer(const char *key, int missing, char *value)
{
    const char *found = find(key);
    int code;

    value[0] = '\0';
    if (!found)
        return missing;
    if (sscanf(found, "error %d", &code) == 1)
        return code;
    if (strlen(found) >= VALUE)
        abort();
    strcpy(value, found);
    return OK;
}

static bool device_name(const void *handle, char *name)
{
    ptrdiff_t offset = (const char *)handle - &handles[0][0];

    if (offset < 0 || offset >= (ptrdiff_t)sizeof handles)
        return false;
    if (offset % (1 + MAX_PLACES))
        snprintf(name, KEY, "%d/%d", (int)(offset / (1 + MAX_PLACES)), (int)(offset % (1 + MAX_PLACES)) - 1);
    else
        snprintf(name, KEY, "%d", (int)(offset / (1 + MAX_PLACES)));
    return true;
}

static int device_index(const void *handle)
{
    return (int)(((const char *)handle - &handles[0][0]) / (1 + MAX_PLACES));
}

/* How long this call is to wait, 0 for not at all; `device` is NULL for calls that are for none. */
static double hang_seconds(const char *device, const char *function)
{
    const char *version = strstr(function, "_v");
    int length = version ? (int)(version - function) : (int)strlen(function);
    const char *found;
    char key[2 * KEY];

    if (!script.hangs)
        return 0;
    snprintf(key, sizeof key, "hang.%.*s", length, function);
    found = find(key);
    if (!found && device) {
        snprintf(key, sizeof key, "%s.hang.%.*s", device, length, function);
        found = find(key);
    }
    return found ? atof(found) : 0;
}

/* Waits, without the lock, in short steps, so that a test can end the wait by taking the line out of the script. */
static void hang(const char *device, const char *function)
{
    const struct timespec step = {0, 10 * 1000 * 1000};

    if (hang_seconds(device, function) == 0)
        return;
    fake_nvml_hanging++;
    for (double waited = 0; waited < hang_seconds(device, function); waited += 0.01) {
        leave();
        nanosleep(&step, NULL);
        enter();
    }
    fake_nvml_hanging--;
}

/* Enters a function, whose name has its version; returns what ends the call at once, or OK. */
static int begin(const char *function, const char *device)
{
    char key[KEY], value[VALUE];

    hang(device, function);
    if (!script.absences)
        return OK;
    snprintf(key, sizeof key, "absent.%s", function);
    return answer(key, OK, value);
}

/* The answer of a function that is for no device. */
static int ask(const char *function, const char *key, int missing, char *value)
{
    int code;

    enter();
    code = begin(function, NULL);
    if (code == OK && fake_nvml_sessions == 0)
        code = UNINITIALIZED;
    if (code == OK)
        code = answer(key, missing, value);
    leave();
    return code;
}

static int ask_device(const char *function, const void *handle, const char *what, int missing, char *value)
{
    char device[KEY], key[2 * KEY];
    int code;

    if (!device_name(handle, device))
        return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%s.%s", device, what);
    enter();
    fake_nvml_device_calls[device_index(handle)]++;
    code = begin(function, device);
    if (code == OK && fake_nvml_sessions == 0)
        code = UNINITIALIZED;
    if (code == OK)
        code = answer("devices", OK, value);
    if (code == OK)
        code = answer(key, missing, value);
    leave();
    return code;
}

static int copy_hex(const char *hex, char *text, unsigned int size)
{
    size_t length = strlen(hex) / 2;

    if (length >= size)
        return INSUFFICIENT_SIZE;
    for (size_t i = 0; i < length; i++) {
        char byte[3] = {hex[2 * i], hex[2 * i + 1], '\0'};
        text[i] = (char)strtol(byte, NULL, 16);
    }
    text[length] = '\0';
    return OK;
}

int nvmlInitWithFlags(unsigned int flags)
{
    char value[VALUE];
    int code;

    (void)flags;
    enter();
    fake_nvml_init_calls++;
    hang(NULL, "nvmlInit");
    code = answer("init", LIBRARY_NOT_FOUND, value);
    if (code == OK)
        fake_nvml_sessions++;
    leave();
    return code;
}

int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

int nvmlShutdown(void)
{
    char value[VALUE];
    int code;

    enter();
    code = fake_nvml_sessions == 0 ? UNINITIALIZED : answer("shutdown", OK, value);
    if (code == OK)
        fake_nvml_sessions--;
    leave();
    return code;
}

const char *nvmlErrorString(int code)
{
    static _Thread_local char text[64];

    snprintf(text, sizeof text, "Fake error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    char value[VALUE];
    int code = ask(__func__, "driver", NOT_SUPPORTED, value);

    return code != OK ? code : copy_hex(value, version, size);
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    char value[VALUE];
    int code = ask(__func__, "count", NOT_SUPPORTED, value);

    if (code == OK)
        *count = (unsigned int)atoi(value);
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    char value[VALUE];

    if (index >= MAX_DEVICES)
        return INVALID_ARGUMENT;
    *handle = &handles[index][0];
    return ask_device(__func__, *handle, "handle", NOT_SUPPORTED, value);
}

int nvmlDeviceGetIndex(void *handle, unsigned int *index)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "handle", NOT_SUPPORTED, value);

    if (code == OK)
        *index = (unsigned int)device_index(handle);
    return code;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned int size)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "uuid", NOT_SUPPORTED, value);

    return code != OK ? code : copy_hex(value, uuid, size);
}

int nvmlDeviceGetName(void *handle, char *name, unsigned int size)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "name", NOT_SUPPORTED, value);

    return code != OK ? code : copy_hex(value, name, size);
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "memory_v1", NOT_SUPPORTED, value);

    if (code == OK)
        sscanf(value, "%llu %llu %llu", &memory->total, &memory->free, &memory->used);
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    char value[VALUE];
    int code;

    if (memory->version != MEMORY_V2_VERSION)
        return ARGUMENT_VERSION_MISMATCH;
    code = ask_device(__func__, handle, "memory_v2", NOT_SUPPORTED, value);
    if (code == OK)
        sscanf(value, "%llu %llu %llu %llu", &memory->total, &memory->reserved, &memory->free, &memory->used);
    return code;
}

int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *utilization)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "utilization", NOT_SUPPORTED, value);

    if (code == OK)
        sscanf(value, "%u %u", &utilization->gpu, &utilization->memory);
    return code;
}

int nvmlDeviceGetMaxClockInfo(void *handle, unsigned int type, unsigned int *megahertz)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, type == CLOCK_MEM ? "memory_clock" : "other_clock", NOT_SUPPORTED, value);

    if (code == OK)
        sscanf(value, "%u", megahertz);
    return code;
}

int nvmlDeviceGetMemoryBusWidth(void *handle, unsigned int *bits)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "bus_width", NOT_SUPPORTED, value);

    if (code == OK)
        sscanf(value, "%u", bits);
    return code;
}

int nvmlDeviceGetMinorNumber(void *handle, unsigned int *number)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "minor_number", NOT_SUPPORTED, value);

    if (code == OK)
        sscanf(value, "%u", number);
    return code;
}

static int throttle_reasons(const char *function, void *handle, unsigned long long *reasons)
{
    char value[VALUE];
    int code = ask_device(function, handle, "throttle", NOT_SUPPORTED, value);

    if (code == OK)
        sscanf(value, "%llu", reasons);
    return code;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons)
{
    return throttle_reasons(__func__, handle, reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons)
{
    return throttle_reasons(__func__, handle, reasons);
}

int nvmlDeviceGetTotalEccErrors(void *handle, unsigned int type, unsigned int counter, unsigned long long *errors)
{
    char value[VALUE];
    const char *what = type == UNCORRECTED && counter == VOLATILE ? "ecc" : "other_ecc";
    int code = ask_device(__func__, handle, what, NOT_SUPPORTED, value);

    if (code == OK)
        sscanf(value, "%llu", errors);
    return code;
}

static int processes(const char *function, void *handle, const char *what, unsigned int *count, struct process *infos)
{
    char value[VALUE], *rest = NULL;
    int code = ask_device(function, handle, what, NOT_SUPPORTED, value);
    unsigned int found = 0, room = infos ? *count : 0;

    if (code != OK)
        return code;
    for (char *word = strtok_r(value, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        struct process process = {0, 0, ~0u, ~0u};
        unsigned long long pid;

        sscanf(word, "%llu:%llu", &pid, &process.used);
        process.pid = (unsigned int)pid;
        if (found < room)
            infos[found] = process;
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned int *count, struct process *infos)
{
    return processes(__func__, handle, "compute", count, infos);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, struct process *infos)
{
    return processes(__func__, handle, "compute", count, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(void *handle, unsigned int *count, struct process *infos)
{
    return processes(__func__, handle, "graphics", count, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned int *count, struct process *infos)
{
    return processes(__func__, handle, "graphics", count, infos);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v2(void *handle, unsigned int *count, struct process *infos)
{
    return processes(__func__, handle, "mps", count, infos);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned int *count, struct process *infos)
{
    return processes(__func__, handle, "mps", count, infos);
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "mig", NOT_SUPPORTED, value);

    if (code == OK) {
        sscanf(value, "%u", current);
        *pending = *current;
    }
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *count)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "mig", NOT_SUPPORTED, value);

    if (code == OK)
        sscanf(value, "%*u %u", count);
    return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int place, void **instance)
{
    char value[VALUE];

    if (place >= MAX_PLACES)
        return INVALID_ARGUMENT;
    *instance = (char *)handle + 1 + place;
    return ask_device(__func__, *instance, "handle", NOT_FOUND, value);
}

int nvmlEventSetCreate(struct event_set **set)
{
    char value[VALUE];
    int code = ask(__func__, "event_set", OK, value);

    if (code != OK)
        return code;
    *set = calloc(1, sizeof **set);
    enter();
    fake_nvml_event_sets++;
    leave();
    return *set ? OK : MEMORY;
}

int nvmlEventSetFree(struct event_set *set)
{
    enter();
    fake_nvml_event_sets--;
    leave();
    free(set);
    return OK;
}

int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, struct event_set *set)
{
    char value[VALUE];
    int code = ask_device(__func__, handle, "events", OK, value);

    if (code == OK && types != XID_EVENT)
        code = NOT_SUPPORTED;
    if (code == OK)
        set->registered[device_index(handle)] = true;
    return code;
}

/* The Xid that stands at a place in the script's list for a device, 0 behind its end. */
static unsigned long long xid_at(int index, int place)
{
    char key[KEY], value[VALUE], *rest = NULL, *word;

    snprintf(key, sizeof key, "%d.xids", index);
    answer(key, OK, value);
    word = strtok_r(value, " ", &rest);
    for (; word && place > 0; place--)
        word = strtok_r(NULL, " ", &rest);
    return word ? strtoull(word, NULL, 10) : 0;
}

/* Never waits: what the script has is there at once, and nothing else comes. */
int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned int milliseconds)
{
    char value[VALUE];
    int code = ask(__func__, "event_wait", OK, value);

    (void)milliseconds;
    if (code != OK)
        return code;
    enter();
    if (set->version != script.version) {
        memset(set->delivered, 0, sizeof set->delivered);
        set->version = script.version;
    }
    code = TIMEOUT;
    for (int index = 0; index < MAX_DEVICES && code != OK; index++) {
        unsigned long long xid = set->registered[index] ? xid_at(index, set->delivered[index]) : 0;

        if (xid) {
            set->delivered[index]++;
            *event = (struct event){&handles[index][0], XID_EVENT, xid, ~0u, ~0u};
            code = OK;
        }
    }
    leave();
    return code;
}
