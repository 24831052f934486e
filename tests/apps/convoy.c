/* Many threads of one process, each in a loop: listen on a port of its own, connect to it, accept,
   three bytes, close. convoy THREADS TURNS
   Prints the longest call in milliseconds on standard error, "ok" when every byte came. */
#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static int turns, failed;
static long longest;

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static int timed(const char *what, long since, int result) {
    long took = now_us() - since, seen = __atomic_load_n(&longest, __ATOMIC_RELAXED);
    while (took > seen && !__atomic_compare_exchange_n(&longest, &seen, took, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    if (result < 0) {
        perror(what);
        __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    }
    return result;
}
#define TIMED(call) (since = now_us(), timed(#call, since, (int)(call)))

static void *loop(void *arg) {
    (void)arg;
    for (int i = 0; i < turns && !failed; i++) {
        long since;
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t len = sizeof a;
        char got[3] = "";
        int l = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM, 0);
        TIMED(bind(l, (struct sockaddr *)&a, sizeof a));
        TIMED(listen(l, 5));
        getsockname(l, (struct sockaddr *)&a, &len);
        TIMED(connect(c, (struct sockaddr *)&a, sizeof a));
        int s = TIMED(accept(l, NULL, NULL));
        TIMED(send(c, "abc", 3, 0));
        TIMED(recv(s, got, 3, MSG_WAITALL));
        if (memcmp(got, "abc", 3))
            failed = 1;
        close(s);
        close(c);
        close(l);
    }
    return NULL;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 200;
    turns = argc > 2 ? atoi(argv[2]) : 20;
    pthread_t *t = calloc(threads, sizeof *t);
    long begun = now_us();
    for (int i = 0; i < threads; i++)
        if (pthread_create(&t[i], NULL, loop, NULL))
            return perror("pthread_create"), 1;
    for (int i = 0; i < threads; i++)
        pthread_join(t[i], NULL);
    fprintf(stderr, "longest call %ld ms, %ld ms in all\n", longest / 1000, (now_us() - begun) / 1000);
    puts(failed ? "failed" : "ok");
    return failed;
}
