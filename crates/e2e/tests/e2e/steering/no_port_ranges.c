/* Preloaded, a kernel that does not know IP_LOCAL_PORT_RANGE (before 6.3). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

enum { PORT_RANGE = 51 };

int getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
	int (*next)(int, int, int, void *, socklen_t *) = dlsym(RTLD_NEXT, "getsockopt");

	if (level == IPPROTO_IP && name == PORT_RANGE) {
		errno = ENOPROTOOPT;
		return -1;
	}
	return next(fd, level, name, value, len);
}
