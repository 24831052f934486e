// A server whose child gives up its rights, and then acts as an attacker. It looks for its parent's
// bytes in the memory that it had, and writes over them.
//
//     dropped serve PORT HOW MOMENT    one connection; "ok" if the child found and changed nothing
//     dropped ask PORT MOMENT          its client: a secret there, the same back; "ok"
//     dropped suffer PORT              a server whose child writes anything into the memory of its
//                                      sockets, for two seconds; "ok" if it lives
//     dropped poke PORT                its client; "ok" if it lives
//
// HOW is the call by which the child gives up its rights. MOMENT says when the child was forked.
// `closed`: it has closed the connection before. `hand`: it serves the connection. `early`: before
// the connection came.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NOBODY 65534
#define SECRET "the secret of the connection that is the parent's"

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}
#define CHECK(x) ((x) < 0 ? (fail(#x), 0) : 0)

// Mappings that are shared with the fork group or peers.
static struct { char *at; size_t len; int arena; } memory[256];
static int memories;

static void look_for_memory(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    if (!maps)
        fail("/proc/self/maps");
    memories = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char rights[8];
        int arena = strstr(line, "/memfd:fastsocket-arena") != NULL;
        if (!arena && !strstr(line, "/memfd:fastsocket-channel"))
            continue;
        if (sscanf(line, "%lx-%lx %7s", &from, &to, rights) != 3 || memories == 256)
            fail("maps");
        memory[memories].at = (char *)from;
        memory[memories].len = to - from;
        memory[memories++].arena = arena;
    }
    fclose(maps);
}

// Number of descriptors of such memory: this process could map it again.
static int descriptors(void)
{
    DIR *all = opendir("/proc/self/fd");
    struct dirent *entry;
    char name[64];
    int held = 0;
    if (!all)
        fail("/proc/self/fd");
    while ((entry = readdir(all))) {
        ssize_t n = readlinkat(dirfd(all), entry->d_name, name, sizeof name - 1);
        if (n < 0)
            continue; // "." and ".."
        name[n] = 0;
        held += strstr(name, "/memfd:fastsocket-arena") || strstr(name, "/memfd:fastsocket-channel");
    }
    closedir(all);
    return held;
}

// Reads and forges what is still there of what was mapped before. How often the secret was found.
static int attack(void)
{
    static unsigned char there[(3u << 30) / 4096];
    int found = 0;
    for (int i = 0; i < memories; i++) {
        size_t pages = memory[i].len / 4096;
        if (pages > sizeof there)
            pages = sizeof there;
        if (mincore(memory[i].at, pages * 4096, there))
            continue; // nothing is mapped there any more
        for (size_t p = 0; p < pages; p++) {
            char *page = memory[i].at + p * 4096;
            if (!(there[p] & 1))
                continue;
            if (memory[i].arena && p >= 2) {
                // Positions, limits, bases: 8 bytes each.
                for (uint64_t *w = (uint64_t *)page; w < (uint64_t *)(page + 4096); w++)
                    if (*w)
                        *w ^= 0x5a5a5a5a5a5aull;
            } else if (!memory[i].arena) {
                char *secret = memmem(page, 4096, SECRET, sizeof SECRET);
                found += secret != NULL;
                if (secret)
                    memset(secret, 'X', sizeof SECRET);
            }
        }
    }
    // Memory that is mapped now under those names, or can be mapped, is too much.
    look_for_memory();
    return found + memories + descriptors();
}

static void *resuid(void *unused)
{
    (void)unused;
    CHECK(setresgid(NOBODY, NOBODY, NOBODY));
    CHECK(setresuid(NOBODY, NOBODY, NOBODY));
    return NULL;
}

static void drop(const char *how)
{
    if (!strcmp(how, "setuid")) {
        CHECK(setgid(NOBODY));
        CHECK(initgroups("nobody", NOBODY));
        CHECK(setuid(NOBODY));
    } else if (!strcmp(how, "setreuid")) {
        CHECK(setgroups(0, NULL));
        CHECK(setregid(NOBODY, NOBODY));
        CHECK(setreuid(NOBODY, NOBODY));
    } else if (!strcmp(how, "setresuid")) {
        resuid(NULL);
    } else if (!strcmp(how, "number")) {
        CHECK(syscall(SYS_setresgid, NOBODY, NOBODY, NOBODY));
        CHECK(syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY));
    } else if (!strcmp(how, "thread")) {
        pthread_t t;
        if (pthread_create(&t, NULL, resuid, NULL) || pthread_join(t, NULL))
            fail("thread");
    } else if (!strcmp(how, "failed")) {
        // Something that fails comes first.
        CHECK(setresuid(NOBODY, NOBODY, -1));
        if (syscall(SYS_setresuid, 7, 8, 9) == 0)
            fail("setresuid by root's saved user");
        CHECK(seteuid(0));
        resuid(NULL);
    } else if (!strcmp(how, "capset")) {
        struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
        struct __user_cap_data_struct none[2] = {{0, 0, 0}, {0, 0, 0}};
        CHECK(syscall(SYS_capset, &head, none));
    } else if (!strcmp(how, "landlock")) {
        struct landlock_ruleset_attr all = {.handled_access_fs = LANDLOCK_ACCESS_FS_WRITE_FILE};
        int rules = syscall(SYS_landlock_create_ruleset, &all, sizeof all, 0);
        CHECK(rules);
        CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
        CHECK(syscall(SYS_landlock_restrict_self, rules, 0));
        close(rules);
    } else if (!strcmp(how, "seccomp")) {
        struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
        struct sock_fprog filter = {1, &allow};
        CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
    } else {
        fail("how?");
    }
}

static void whole(int fd, char *buf, size_t n, int out)
{
    for (size_t done = 0; done < n;) {
        ssize_t k = out ? send(fd, buf + done, n - done, MSG_NOSIGNAL) : recv(fd, buf + done, n - done, 0);
        if (k <= 0)
            fail(out ? "send" : "recv");
        done += k;
    }
}

static void child(int conn, int listener, const char *how, const char *moment, int tell, int hear)
{
    char buf[sizeof SECRET], c = 'x';
    int hand = !strcmp(moment, "hand");
    if (conn >= 0 && !hand)
        close(conn);
    close(listener);
    look_for_memory();
    if (memories && !descriptors())
        fail("no descriptor of the memory is kept: there is nothing to look for");
    drop(how);
    CHECK(write(tell, &c, 1));
    CHECK(read(hear, &c, 1));
    if (hand) {
        whole(conn, buf, sizeof buf, 0);
        whole(conn, buf, sizeof buf, 1);
        CHECK(write(tell, &c, 1));
        CHECK(read(hear, &c, 1));
        close(conn);
    }
    int found = attack();
    CHECK(write(tell, &c, 1));
    CHECK(read(hear, &c, 1));
    fprintf(stderr, "after %s: found %d\n", how, found);
    _exit(found ? 7 : 0);
}

static int accept_one(int l)
{
    int s = accept(l, NULL, NULL);
    CHECK(s);
    return s;
}

static int serve(int port, const char *how, const char *moment)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int l = socket(AF_INET, SOCK_STREAM, 0), one = 1, up[2], down[2], status, s = -1;
    char buf[sizeof SECRET], c;
    CHECK(setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
    CHECK(bind(l, (void *)&a, sizeof a));
    CHECK(listen(l, 16));
    CHECK(pipe(up));
    CHECK(pipe(down));
    // The first connection is there so that the parent has memory.
    int first = accept_one(l);
    if (strcmp(moment, "early"))
        s = accept_one(l);
    pid_t pid = fork();
    CHECK(pid);
    if (pid == 0) {
        close(first);
        child(s, l, how, moment, up[1], down[0]);
    }
    CHECK(read(up[0], &c, 1)); // it has dropped
    if (s < 0)
        s = accept_one(l);
    // The client sends when it is told.
    c = 'g';
    whole(first, &c, 1, 1);
    if (!strcmp(moment, "hand")) {
        CHECK(write(down[1], &c, 1));
        CHECK(read(up[0], &c, 1)); // served
        whole(first, &c, 1, 1);
    }
    // The secret is in the ring now.
    whole(first, &c, 1, 0);
    CHECK(write(down[1], &c, 1));
    CHECK(read(up[0], &c, 1)); // it has attacked
    for (int i = 0; i < 200; i++) {
        whole(s, buf, sizeof buf, 0);
        whole(s, buf, sizeof buf, 1);
    }
    CHECK(write(down[1], &c, 1));
    CHECK(waitpid(pid, &status, 0));
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        return 1;
    return 0;
}

static int dial(struct sockaddr_in *a)
{
    int s = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(s, (void *)a, sizeof *a));
    return s;
}

static int ask(int port, int hand)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    char buf[sizeof SECRET] = SECRET, c;
    int first = dial(&a), s = dial(&a);
    whole(first, &c, 1, 0);
    if (hand) {
        whole(s, buf, sizeof buf, 1);
        whole(s, buf, sizeof buf, 0);
        whole(first, &c, 1, 0);
    }
    for (int i = 0; i < 200; i++) {
        whole(s, buf, sizeof buf, 1);
        if (i == 0)
            whole(first, &c, 1, 1);
        whole(s, buf, sizeof buf, 0);
        if (memcmp(buf, SECRET, sizeof buf))
            fail("somebody has changed it");
    }
    return 0;
}

#define PAIRS 6
#define LONG (1 << 18)

// Sends and receives, whatever comes of it.
static void *babble(void *fd)
{
    static const size_t sizes[] = {1, 8, 16, 100, 2048, 3000, 70000, LONG};
    int s = (int)(intptr_t)fd;
    char *buf = calloc(1, LONG);
    struct timeval t = {0, 20000};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
    for (unsigned i = s;; i++) {
        size_t n = sizes[i % (sizeof sizes / sizeof *sizes)];
        ssize_t a = send(s, buf, n, MSG_NOSIGNAL | (i & 8 ? MSG_DONTWAIT : 0));
        ssize_t b = recv(s, buf, sizes[i / 3 % (sizeof sizes / sizeof *sizes)], i & 4 ? MSG_DONTWAIT : 0);
        if (a < 0 && b < 0)
            usleep(500);
    }
    return NULL;
}

static void babble_all(const int *s)
{
    pthread_t t;
    for (int i = 0; i < PAIRS; i++)
        if (pthread_create(&t, NULL, babble, (void *)(intptr_t)s[i]))
            fail("thread");
}

static void scribble(void)
{
    static unsigned char there[65536];
    uint64_t seed = getpid();
    for (;;)
        for (int i = 0; i < memories; i++) {
            size_t pages = memory[i].len / 4096;
            if (!memory[i].arena || pages > sizeof there || mincore(memory[i].at, memory[i].len, there))
                continue;
            for (size_t p = 0; p < pages; p += 1 + (p == 0)) // not the counters, by which this is judged
                for (int k = 0; (there[p] & 1) && k < 64; k++) {
                    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
                    uint64_t v = seed >> 62 ? (seed >> 20) % (1 << 22) : seed;
                    ((volatile uint64_t *)(memory[i].at + p * 4096))[seed >> 33 & 511] = v;
                }
        }
}

static int suffer(int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int l = socket(AF_INET, SOCK_STREAM, 0), s[PAIRS], one = 1;
    CHECK(setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
    CHECK(bind(l, (void *)&a, sizeof a));
    CHECK(listen(l, 16));
    for (int i = 0; i < PAIRS; i++)
        s[i] = accept_one(l);
    pid_t pid = fork();
    CHECK(pid);
    if (pid == 0) {
        look_for_memory();
        alarm(10);
        scribble();
    }
    babble_all(s);
    usleep(2000000);
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, NULL, 0));
    puts("ok");
    _exit(0);
}

static int poke(int port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int s[PAIRS];
    for (int i = 0; i < PAIRS; i++)
        s[i] = dial(&a);
    babble_all(s);
    usleep(1500000);
    puts("ok");
    _exit(0);
}

int main(int argc, char **argv)
{
    alarm(40);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 3 && !strcmp(argv[1], "suffer"))
        return suffer(atoi(argv[2]));
    if (argc == 3 && !strcmp(argv[1], "poke"))
        return poke(atoi(argv[2]));
    int serves = argc == 5 && !strcmp(argv[1], "serve");
    if (!serves && (argc != 4 || strcmp(argv[1], "ask")))
        return 2;
    int r = serves ? serve(atoi(argv[2]), argv[3], argv[4]) : ask(atoi(argv[2]), !strcmp(argv[3], "hand"));
    if (!r)
        puts("ok");
    return r;
}
