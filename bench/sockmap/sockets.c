/* A program without the library (static): `sockets rtt|bulk SIZE SECONDS`, `sockets semantics [splice]`.
 * rtt: microseconds a round trip, and of CPU; bulk: MB/s, and nanoseconds of CPU a KB; both ends together. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int listener, client, server;
static struct sockaddr_in address = { .sin_family = AF_INET };
static char buffer[1 << 20];

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu(int who)
{
	struct rusage r;

	getrusage(who, &r);
	return r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) * 1e-6;
}

static int dial(void)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;

	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	if (connect(fd, (void *)&address, sizeof address))
		exit(1);
	return fd;
}

static int all(int fd, int size)
{
	for (int got = 0, k; got < size; got += k)
		if ((k = recv(fd, buffer, size - got, 0)) <= 0)
			return 0;
	return 1;
}

static void measure(int bulk, int size, double seconds)
{
	int one = 1;
	long n = 0;

	if (!fork()) {
		server = accept(listener, 0, 0);
		setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
		if (bulk)
			while (recv(server, buffer, size, 0) > 0)
				;
		else
			while (all(server, size))
				send(server, buffer, size, 0);
		_exit(0);
	}
	client = dial();
	usleep(20000); /* both ends are in the map */
	double begun = now(), end = begun + seconds;
	while (now() < end)
		for (int i = 0; i < 16; i++, n++)
			if (send(client, buffer, size, 0) <= 0 || (!bulk && !all(client, size)))
				exit(1);
	double took = now() - begun;
	close(client);
	wait(0);
	double used = cpu(RUSAGE_SELF) + cpu(RUSAGE_CHILDREN);
	if (bulk)
		printf("%.0f %.0f\n", n * (double)size / took / 1e6, used / n / size * 1e12);
	else
		printf("%.2f %.2f\n", took / n * 1e6, used / n * 1e6);
}

/* A fresh connection; a moment later both ends are in the map. */
static void fresh(void)
{
	close(client);
	close(server);
	client = dial();
	server = accept(listener, 0, 0);
	usleep(2000);
}

static int readable(void)
{
	struct pollfd p = { server, POLLIN, 0 };

	return poll(&p, 1, 100);
}

static void semantics(int splicing)
{
	int low = 10, small = 8192, k, pipes[2];
	long total = 0;

	fresh();
	setsockopt(server, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low);
	send(client, "hello", 5, 0);
	printf("SO_RCVLOWAT 10, 5 bytes sent: poll %d\n", readable());

	fresh();
	send(client, "hello", 5, 0);
	usleep(2000);
	close(server);
	usleep(2000);
	k = recv(client, buffer, 10, MSG_DONTWAIT);
	printf("the peer closes with 5 bytes unread: recv %d %s\n", k, k < 0 ? strerror(errno) : "");

	fresh();
	send(client, "x", 1, MSG_OOB);
	printf("an urgent byte alone: poll %d\n", readable());

	fresh();
	setsockopt(server, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
	setsockopt(client, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
	while (total < (64l << 20) && (k = send(client, buffer, 4096, MSG_DONTWAIT)) > 0)
		total += k;
	printf("nobody reads, buffers of 8 KiB: %s than 64 MiB are taken\n", k > 0 ? "more" : "less");

	if (!splicing)
		return;
	fresh();
	pipe(pipes);
	send(client, "hello", 5, 0);
	printf("splice out of a readable socket: %s", readable() ? "" : "(not readable) ");
	fflush(stdout);
	alarm(3); /* ends the program if it sleeps */
	printf("%zd\n", splice(server, 0, pipes[1], 0, 1000, 0));
}

int main(int argc, char **argv)
{
	socklen_t n = sizeof address;

	setvbuf(stdout, 0, _IOLBF, 0);
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	listener = socket(AF_INET, SOCK_STREAM, 0);
	bind(listener, (void *)&address, n);
	listen(listener, 16);
	getsockname(listener, (void *)&address, &n);
	if (argc > 3)
		measure(!strcmp(argv[1], "bulk"), atoi(argv[2]), atof(argv[3]));
	else
		semantics(argc > 2);
	return 0;
}
