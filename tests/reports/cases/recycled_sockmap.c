/* report: a proxy puts its accepted connections into a BPF sockmap: EOPNOTSUPP, the kernel is given a placeholder
 * kind: descriptors that the kernel takes by number
 * stock: update 0: bytes 3
 * path: shm
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/bpf.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static int bpf(int command, union bpf_attr *attr) {
    long result = syscall(SYS_bpf, command, attr, sizeof *attr);
    return result < 0 ? -errno : result;
}

static int update(int map, unsigned key, int fd) {
    union bpf_attr attr = {0};
    attr.map_fd = map;
    attr.key = (unsigned long)&key;
    attr.value = (unsigned long)&fd;
    return bpf(BPF_MAP_UPDATE_ELEM, &attr);
}

int main(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    bind(listener, (void *)&a, size);
    getsockname(listener, (void *)&a, &size);
    listen(listener, 4);
    union bpf_attr create = {.map_type = BPF_MAP_TYPE_SOCKMAP, .key_size = 4, .value_size = 4, .max_entries = 8};
    int map = bpf(BPF_MAP_CREATE, &create);
    char byte[9];
    for (int i = 0; i < 3; i++) {
        int client = socket(AF_INET, SOCK_STREAM, 0);
        connect(client, (void *)&a, size);
        int server = accept(listener, 0, 0);
        int result = update(map, i, i == 1 ? client : server);
        write(client, "abc", 3);
        printf("update %d: bytes %zd\n", result, recv(server, byte, 3, 0));
    }
    printf("listener %d\n", update(map, 5, listener));
    int client = socket(AF_INET, SOCK_STREAM, 0);
    connect(client, (void *)&a, size);
    int server = accept(listener, 0, 0);
    write(client, "abc", 3);
    printf("after: bytes %zd\n", read(server, byte, 3));
    return 0;
}
