/* report: calls with more than 2 GiB return a length that is negative as an int
 * kind: lengths
 * stock: send 2147479552
 * path: shm
 */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define GIB (1ul << 30)
static int server;
static unsigned long long received;

static void *reader(void *sink) {
    long n;
    while ((n = read(server, sink, 8 << 20)) > 0)
        received += n;
    return 0;
}

int main(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    bind(listener, (void *)&a, size);
    getsockname(listener, (void *)&a, &size);
    listen(listener, 4);
    int client = socket(AF_INET, SOCK_STREAM, 0);
    connect(client, (void *)&a, size);
    server = accept(listener, 0, 0);
    char *from = mmap(0, 3 * GIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *to = mmap(0, 3 * GIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct iovec in[3] = {{to, GIB}, {to + GIB, GIB}, {to + 2 * GIB, GIB}};
    struct iovec out[3] = {{from, GIB}, {from + GIB, GIB}, {from + 2 * GIB, GIB}};
    write(client, "hello", 5);
    printf("recv %zd\n", recv(server, to, 3 * GIB, 0));
    write(client, "hello", 5);
    printf("readv %zd\n", readv(server, in, 3));
    pthread_t thread;
    pthread_create(&thread, 0, reader, malloc(8 << 20));
    printf("send %zd\n", send(client, from, 3 * GIB, 0));
    printf("writev %zd\n", writev(client, out, 3));
    int file = memfd_create("zeros", 0);
    off_t offset = 0;
    if (ftruncate(file, 3 * GIB))
        return 1;
    printf("sendfile %zd\n", sendfile(client, file, &offset, 3 * GIB));
    struct msghdr message = {.msg_iov = out, .msg_iovlen = 3};
    printf("sendmsg %zd\n", sendmsg(client, &message, 0));
    shutdown(client, SHUT_WR);
    pthread_join(thread, 0);
    printf("all arrived: %d\n", received == 4ull * 2147479552);
    return 0;
}
