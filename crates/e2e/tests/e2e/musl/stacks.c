/* How much stack the deepest call takes, each on a thread that has 64 KiB: one line for each call, "NAME BYTES", and the
 * deepest at the end. Under the library that is libc's function and the hook. */
#include "talk.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <sys/wait.h>

extern char **environ;

enum { STACK = 64 << 10, PAINT = 0xa5 };

static unsigned char stack[STACK] __attribute__((aligned(4096)));
static struct sockaddr_in address;
static socklen_t length = sizeof address;
static int listener, client, server, instance, copy, file;
static char bytes[4096], *nothing[] = {"nothing", NULL};
static struct iovec vector = {bytes, 8};
static struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
static struct epoll_event event = {.events = EPOLLIN};

/* The library begins in it. */
static void do_first(void) { listener = socket(AF_INET, SOCK_STREAM, 0); MUST(listener >= 0); }
static void do_socket(void) { client = socket(AF_INET, SOCK_STREAM, 0); MUST(client >= 0); }
static void do_bind(void) { MUST(bind(listener, (struct sockaddr *)&address, sizeof address) == 0); }
static void do_listen(void) { MUST(listen(listener, 5) == 0); }
static void do_getsockname(void) { MUST(getsockname(listener, (struct sockaddr *)&address, &length) == 0); }
static void do_connect(void) { MUST(connect(client, (struct sockaddr *)&address, sizeof address) == 0); }
static void do_accept(void) { server = accept(listener, NULL, NULL); MUST(server >= 0); }
static void do_send(void) { MUST(send(client, bytes, 8, 0) == 8); }
static void do_poll(void) { struct pollfd p = {server, POLLIN, 0}; MUST(poll(&p, 1, 10000) == 1); }
static void do_select(void) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(server, &set);
    MUST(select(server + 1, &set, NULL, NULL, NULL) == 1);
}
static void do_epoll_create(void) { instance = epoll_create1(0); MUST(instance >= 0); }
static void do_epoll_ctl(void) { MUST(epoll_ctl(instance, EPOLL_CTL_ADD, server, &event) == 0); }
static void do_epoll_wait(void) { struct epoll_event e; MUST(epoll_wait(instance, &e, 1, 10000) == 1); }
static void do_recv(void) { MUST(recv(server, bytes, 8, 0) == 8); }
static void do_write(void) { MUST(write(client, bytes, 8) == 8); }
static void do_read(void) { MUST(read(server, bytes, 8) == 8); }
static void do_writev(void) { MUST(writev(client, &vector, 1) == 8); }
static void do_readv(void) { MUST(readv(server, &vector, 1) == 8); }
static void do_sendmsg(void) { MUST(sendmsg(client, &message, 0) == 8); }
static void do_recvmsg(void) { MUST(recvmsg(server, &message, 0) == 8); }
static void do_sendmmsg(void) { struct mmsghdr m = {.msg_hdr = message}; MUST(sendmmsg(client, &m, 1, 0) == 1); }
static void do_recvmmsg(void) { struct mmsghdr m = {.msg_hdr = message}; MUST(recvmmsg(server, &m, 1, 0, NULL) == 1); }
static void do_sendfile(void) { off_t at = 0; MUST(sendfile(client, file, &at, 8) == 8); do_read(); }
/* It sleeps first, in us, and is woken by nobody but its limit. */
static void do_recv_limited(void) { MUST(recv(server, bytes, 8, 0) < 0 && errno == EAGAIN); }
static void do_setsockopt(void) {
    struct timeval limit = {0, 20000};
    MUST(setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
}
static void do_fcntl(void) { MUST(fcntl(client, F_SETFL, fcntl(client, F_GETFL)) == 0); }
static void do_dup2(void) { copy = dup2(client, 60); MUST(copy == 60); }
static void do_fork(void) {
    pid_t pid = fork();
    if (pid == 0)
        _exit(send(client, bytes, 8, 0) != 8);
    int status;
    MUST(waitpid(pid, &status, 0) == pid && status == 0);
    do_read();
}
static void do_exec_that_fails(void) { MUST(execve("/nowhere", nothing, environ) < 0); }
static void do_exec_of_a_file(void) { MUST(execve("/proc/self/status", nothing, environ) < 0); }
static void do_execlp_that_fails(void) { MUST(execlp("no-such-program", "a", "b", NULL) < 0); }
static void do_posix_spawn(void) {
    char *argv[] = {"true", NULL};
    pid_t pid;
    int status;
    MUST(posix_spawnp(&pid, "true", NULL, NULL, argv, environ) == 0);
    MUST(waitpid(pid, &status, 0) == pid && status == 0);
}
static void do_system(void) { MUST(system("exit 3") == 3 << 8); }
static void do_dlopen(void) { MUST(dlopen("/nowhere.so", RTLD_NOW) == NULL); }
static void do_passing(void) {
    int u[2], fd = client;
    char control[CMSG_SPACE(sizeof fd)] = "", byte;
    struct iovec iov = {&byte, 1};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, u) == 0 && sendmsg(u[0], &m, 0) == 1 && recvmsg(u[1], &m, 0) == 1);
    MUST(close(u[0]) == 0 && close(u[1]) == 0);
}
static void do_fdopen(void) {
    int fd = dup(client);
    FILE *f = fdopen(fd, "r+");
    MUST(f && fclose(f) == 0);
}
static void do_shutdown(void) { MUST(shutdown(client, SHUT_WR) == 0); }
static void do_close(void) { MUST(close(copy) == 0 && close(client) == 0 && close(server) == 0); }
static void do_listener_close(void) { MUST(close(listener) == 0); }

#define CALL(name) {#name, do_##name}
static const struct {
    const char *name;
    void (*run)(void);
} calls[] = {
    CALL(first), CALL(socket), CALL(bind), CALL(listen), CALL(getsockname), CALL(connect), CALL(accept), CALL(send), CALL(poll),
    CALL(select), CALL(epoll_create), CALL(epoll_ctl), CALL(epoll_wait), CALL(recv), CALL(write), CALL(read),
    CALL(writev), CALL(readv), CALL(sendmsg), CALL(recvmsg), CALL(sendmmsg), CALL(recvmmsg), CALL(sendfile),
    CALL(setsockopt), CALL(recv_limited), CALL(fcntl), CALL(dup2), CALL(fork), CALL(exec_that_fails),
    CALL(exec_of_a_file), CALL(execlp_that_fails), CALL(posix_spawn), CALL(system), CALL(dlopen), CALL(passing),
    CALL(fdopen), CALL(shutdown), CALL(close), CALL(listener_close),
};

static unsigned char *top;

static void *run(void *i) {
    unsigned char here;
    top = &here;
    calls[(size_t)i].run();
    return NULL;
}

static size_t depth(size_t i) {
    pthread_attr_t attributes;
    pthread_t thread;
    memset(stack, PAINT, sizeof stack);
    MUST(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, sizeof stack) == 0);
    MUST(pthread_create(&thread, &attributes, run, (void *)i) == 0 && pthread_join(thread, NULL) == 0);
    size_t untouched = 0;
    while (untouched < sizeof stack && stack[untouched] == PAINT)
        untouched++;
    return (size_t)(top - stack) - untouched;
}

int main(void) {
    size_t deepest = 0;
    const char *which = "";
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    MUST((file = open("/proc/self/exe", O_RDONLY)) >= 0);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        size_t n = depth(i);
        printf("%s %zu\n", calls[i].name, n);
        if (n > deepest) {
            deepest = n;
            which = calls[i].name;
        }
    }
    printf("deepest %zu %s\n", deepest, which);
    puts("ok");
    return 0;
}
