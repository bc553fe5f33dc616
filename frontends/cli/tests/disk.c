/* Loaded into the command by tests (LD_PRELOAD). Of all calls about files below the folder DISK_ROOT it
 *
 * - writes a log to the file DISK_LOG, from which a test computes what a power cut may leave, and
 * - lets some fail: DISK_FAULT=CALL:ERRNO:FIRST:COUNT lets calls number FIRST up to FIRST + COUNT - 1 of that name
 *   fail, from 1. With ERRNO 0 a write writes half of its bytes.
 *
 * A line of the log is a call and its arguments; data are hexadecimal. Open files have numbers of their own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define FDS 1024
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int numbers[FDS]; /* Of open files below the folder, from 1. */
static int last_number, call_count;
static FILE *out;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A path relative to the folder, or NULL if it is not below it. */
static const char *below(const char *path) {
    const char *root = getenv("DISK_ROOT");
    size_t n = root ? strlen(root) : 0;
    if (!n || !path || strncmp(path, root, n) || (path[n] && path[n] != '/')) return NULL;
    return path[n] ? path + n + 1 : ".";
}

static int number_of(int fd) { return fd >= 0 && fd < FDS ? numbers[fd] : 0; }

static void say(const char *format, ...) {
    if (!getenv("DISK_LOG")) return;
    if (!out) {
        /* By its number, so that this file's own calls are not logged. */
        int fd = REAL(open64)(getenv("DISK_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        if (fd < 0 || !(out = fdopen(fd, "a"))) abort();
    }
    va_list arguments;
    va_start(arguments, format);
    vfprintf(out, format, arguments);
    va_end(arguments);
}

/* Whether a call fails now; sets errno. */
static int fails(const char *call) {
    const char *fault = getenv("DISK_FAULT");
    size_t n = strlen(call);
    int error, first, count;
    if (!fault || strncmp(fault, call, n) || fault[n] != ':') return 0;
    if (sscanf(fault + n + 1, "%d:%d:%d", &error, &first, &count) != 3) abort();
    call_count++;
    if (call_count < first || call_count >= first + count) return 0;
    errno = error;
    return 1;
}

int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & O_CREAT) {
        va_list arguments;
        va_start(arguments, flags);
        mode = va_arg(arguments, mode_t);
        va_end(arguments);
    }
    const char *name = below(path);
    if (!name) return REAL(open64)(path, flags, mode);
    pthread_mutex_lock(&lock);
    int fd = -1;
    if (!fails("open")) {
        int is_new = (flags & O_CREAT) && access(path, F_OK);
        fd = REAL(open64)(path, flags, mode);
        if (fd >= 0 && fd < FDS) {
            numbers[fd] = ++last_number;
            say("%s %d %s\n", is_new ? "create" : "open", numbers[fd], name);
        }
    }
    int error = errno;
    fflush(out);
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

int close(int fd) {
    if (number_of(fd)) numbers[fd] = 0;
    return REAL(close)(fd);
}

ssize_t write(int fd, const void *bytes, size_t length) {
    if (!number_of(fd)) return REAL(write)(fd, bytes, length);
    pthread_mutex_lock(&lock);
    ssize_t written = -1;
    int failed = fails("write");
    if (failed && !errno && length > 1) length /= 2;
    if (!failed || !errno) {
        written = REAL(write)(fd, bytes, length);
        say("write %d ", number_of(fd));
        for (ssize_t i = 0; i < written; i++) say("%02x", ((const unsigned char *)bytes)[i]);
        say("\n");
    }
    int error = errno;
    if (out) fflush(out);
    pthread_mutex_unlock(&lock);
    errno = error;
    return written;
}

/* A call with a result of 0, and its line of the log. */
#define CALL(name, is_below, call, ...)            \
    if (!(is_below)) return call;                  \
    pthread_mutex_lock(&lock);                     \
    int result = fails(name) ? -1 : (call);        \
    int error = errno;                             \
    if (!result) say(__VA_ARGS__);                 \
    if (out) fflush(out);                          \
    pthread_mutex_unlock(&lock);                   \
    errno = error;                                 \
    return result

int ftruncate64(int fd, off64_t length) {
    CALL("ftruncate", number_of(fd), REAL(ftruncate64)(fd, length), "truncate %d %ld\n", number_of(fd), (long)length);
}
int fsync(int fd) { CALL("fsync", number_of(fd), REAL(fsync)(fd), "sync %d\n", number_of(fd)); }
int fdatasync(int fd) { CALL("fsync", number_of(fd), REAL(fdatasync)(fd), "sync %d\n", number_of(fd)); }
int mkdir(const char *path, mode_t mode) {
    CALL("mkdir", below(path), REAL(mkdir)(path, mode), "mkdir %s\n", below(path));
}
int rename(const char *from, const char *to) {
    CALL("rename", below(to), REAL(rename)(from, to), "rename %s %s\n", below(from), below(to));
}
int symlink(const char *to, const char *path) {
    CALL("symlink", below(path), REAL(symlink)(to, path), "symlink %s %s\n", to, below(path));
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    CALL("link", below(to), REAL(linkat)(a, from, b, to, flags), "link %s %s\n", below(from), below(to));
}
int unlink(const char *path) { CALL("unlink", below(path), REAL(unlink)(path), "unlink %s\n", below(path)); }
int rmdir(const char *path) { CALL("unlink", below(path), REAL(rmdir)(path), "unlink %s\n", below(path)); }

int unlinkat(int fd, const char *path, int flags) {
    char whole[2 * PATH_MAX] = "";
    if (fd == AT_FDCWD || path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        char self[64];
        snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(self, whole, PATH_MAX);
        if (n > 0) snprintf(whole + n, sizeof whole - n, "/%s", path);
    }
    CALL("unlink", below(whole), REAL(unlinkat)(fd, path, flags), "unlink %s\n", below(whole));
}
