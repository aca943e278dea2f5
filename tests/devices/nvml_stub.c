/* A stand-in for libnvidia-ml.so.1: the part of NVML that ckbench reads, scripted by environment variables.
 *
 *   NVML_STUB_DEVICES    UUIDs, separated by commas: a card per GPU-..., a partition of the card before it per MIG-...
 *   NVML_STUB_PROCESSES  LIST:DEVICE:PID:BYTES, separated by commas; LIST is compute or graphics, DEVICE a position
 *                        in NVML_STUB_DEVICES, PID a number or self, BYTES a number or na
 *   NVML_STUB_REFUSE     FUNCTION=CODE, separated by commas: what these functions return (13: as if not there)
 *   NVML_STUB_NA         FUNCTIONS, separated by commas, that succeed and write the mark for an unknown value
 *   NVML_STUB_REASONS    bit mask of throttle reasons, decimal
 *
 * Device i has (i + 1) GiB in use, 80 GiB in total and 1000 + i MHz, so that a mix-up shows.
 * Signatures and structures are those of nvml.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
#define MAX_DEVICES 16
#define GIB (1ull << 30)

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory_v2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

static int sessions = 0;

/* For the test: inits that were not shut down. */
int stub_sessions(void) { return sessions; }

static const char *setting(const char *name) {
    const char *text = getenv(name);
    return text == NULL ? "" : text;
}

/* The item of a comma-separated list that starts with `name`; its text after `name`, or NULL. */
static const char *item(const char *list, const char *name) {
    size_t length = strlen(name);
    while (*list != '\0') {
        const char after = strncmp(list, name, length) == 0 ? list[length] : 'x';
        if (after == '=' || after == ',' || after == '\0') return list + length;
        list = strchr(list, ',');
        if (list == NULL) return NULL;
        list++;
    }
    return NULL;
}

static int refused(const char *function) {
    const char *after = item(setting("NVML_STUB_REFUSE"), function);
    return after == NULL ? SUCCESS : atoi(after + 1);
}

static int is_na(const char *function) { return item(setting("NVML_STUB_NA"), function) != NULL; }

static int devices(char uuids[MAX_DEVICES][96]) {
    char copy[2048];
    int n = 0;
    snprintf(copy, sizeof copy, "%s", setting("NVML_STUB_DEVICES"));
    for (char *uuid = strtok(copy, ","); uuid != NULL && n < MAX_DEVICES; uuid = strtok(NULL, ","))
        snprintf(uuids[n++], 96, "%s", uuid);
    return n;
}

static int is_card(const char *uuid) { return strncmp(uuid, "GPU-", 4) == 0; }

/* A handle is the position of a device plus one. */
static void *handle(int position) { return (void *)(size_t)(position + 1); }
static int position(void *handle) { return (int)(size_t)handle - 1; }

#define REFUSE_IF_TOLD                       \
    do {                                     \
        int code = refused(__func__);        \
        if (code != SUCCESS) return code;    \
    } while (0)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    REFUSE_IF_TOLD;
    sessions++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    sessions--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    (void)code;
    return "an error of the stub";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    REFUSE_IF_TOLD;
    snprintf(version, length, "580.95.05");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char uuids[MAX_DEVICES][96];
    REFUSE_IF_TOLD;
    *count = 0;
    for (int i = 0, n = devices(uuids); i < n; i++) *count += is_card(uuids[i]);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    char uuids[MAX_DEVICES][96];
    REFUSE_IF_TOLD;
    for (int i = 0, n = devices(uuids); i < n; i++) {
        if (!is_card(uuids[i]) || index-- > 0) continue;
        *device = handle(i);
        return SUCCESS;
    }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    char uuids[MAX_DEVICES][96];
    REFUSE_IF_TOLD;
    for (int i = 0, n = devices(uuids); i < n; i++) {
        if (strcmp(uuids[i], uuid) != 0) continue;
        *device = handle(i);
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    char uuids[MAX_DEVICES][96];
    REFUSE_IF_TOLD;
    devices(uuids);
    snprintf(uuid, length, "%s", uuids[position(device)]);
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    (void)device;
    REFUSE_IF_TOLD;
    *count = 7; /* as on an A100 or H100, however many partitions there are */
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part) {
    char uuids[MAX_DEVICES][96];
    int n = devices(uuids), i = position(device) + 1 + (int)index;
    REFUSE_IF_TOLD;
    for (int j = position(device) + 1; j <= i; j++)
        if (j >= n || is_card(uuids[j])) return NOT_FOUND;
    *part = handle(i);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    REFUSE_IF_TOLD;
    memset(memory, is_na(__func__) ? 0xff : 0, sizeof *memory);
    if (is_na(__func__)) return SUCCESS;
    memory->total = 80 * GIB;
    memory->used = (position(device) + 1) * GIB + GIB / 2; /* the driver's reserve counts here */
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, Memory_v2 *memory) {
    REFUSE_IF_TOLD;
    if (memory->version != (sizeof *memory | 2u << 24)) return 25;
    memset(memory, is_na(__func__) ? 0xff : 0, sizeof *memory);
    if (is_na(__func__)) return SUCCESS;
    memory->total = 80 * GIB;
    memory->reserved = GIB / 2;
    memory->used = (position(device) + 1) * GIB;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

static int processes(const char *list, void *device, unsigned *count, Process *found) {
    char copy[2048], kind[16], pid[32], bytes[32];
    unsigned n = 0, room = *count;
    int at;
    snprintf(copy, sizeof copy, "%s", setting("NVML_STUB_PROCESSES"));
    for (char *entry = strtok(copy, ","); entry != NULL; entry = strtok(NULL, ",")) {
        if (sscanf(entry, "%15[^:]:%d:%31[^:]:%31s", kind, &at, pid, bytes) != 4) abort();
        if (strcmp(kind, list) != 0 || at != position(device)) continue;
        if (found != NULL && n < room) {
            memset(&found[n], 0xff, sizeof found[n]);
            found[n].pid = strcmp(pid, "self") == 0 ? (unsigned)getpid() : (unsigned)atoi(pid);
            found[n].used = strcmp(bytes, "na") == 0 ? ~0ull : strtoull(bytes, NULL, 10);
        }
        n++;
    }
    *count = n;
    return n > room || (found == NULL && n > 0) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *found) {
    REFUSE_IF_TOLD;
    return processes("compute", device, count, found);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, Process *found) {
    REFUSE_IF_TOLD;
    return processes("graphics", device, count, found);
}

#define FIGURE(signature, out, value)            \
    int signature {                              \
        (void)device;                            \
        REFUSE_IF_TOLD;                          \
        *out = is_na(__func__) ? ~0ull : (value); \
        return SUCCESS;                          \
    }

FIGURE(nvmlDeviceGetClockInfo(void *device, int type, unsigned *clock), clock, type == 1 ? 1000u + position(device) : 0)
FIGURE(nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned *clock), clock, type == 1 ? 1980u : 0)
FIGURE(nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius), celsius, sensor == 0 ? 41u : 0)
FIGURE(nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts), milliwatts, 123456u)
FIGURE(nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *bits), bits,
       strtoull(setting("NVML_STUB_REASONS"), NULL, 10))
FIGURE(nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits), bits,
       strtoull(setting("NVML_STUB_REASONS"), NULL, 10))
