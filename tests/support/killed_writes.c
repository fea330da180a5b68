/* Preloaded: the process is killed at a chosen change of a file, before it or in the midst of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

/* Changes until the kill; below zero nobody is killed. */
long killed_writes_left = -1;
/* Whether half of the bytes of the last write arrive. */
int killed_writes_half = 0;

static int due(void) { return killed_writes_left >= 0 && killed_writes_left-- == 0; }

static void end(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

static int of_a_file(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

#define WRITES(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t size, offset_type offset) { \
        if (of_a_file(fd) && due()) { \
            if (killed_writes_half) REAL(name)(fd, data, size / 2, offset); \
            end(); \
        } \
        return REAL(name)(fd, data, size, offset); \
    }
WRITES(pwrite, off_t)
WRITES(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t size) {
    if (of_a_file(fd) && due()) {
        if (killed_writes_half) REAL(write)(fd, data, size / 2);
        end();
    }
    return REAL(write)(fd, data, size);
}

#define CHANGES(result, name, declared, given) \
    result name declared { \
        if (due()) end(); \
        return REAL(name) given; \
    }
CHANGES(int, ftruncate, (int fd, off_t size), (fd, size))
CHANGES(int, ftruncate64, (int fd, off64_t size), (fd, size))
CHANGES(int, fsync, (int fd), (fd))
CHANGES(int, fdatasync, (int fd), (fd))
CHANGES(int, unlink, (const char *path), (path))
CHANGES(int, rename, (const char *from, const char *to), (from, to))
