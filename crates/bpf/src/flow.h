/* A connection as its own host sees it. */
#ifndef FSOCKET_FLOW_H
#define FSOCKET_FLOW_H

struct flow {
	/* Network byte order; IPv4 in v4-mapped form. */
	__u32 local_ip[4];
	__u32 remote_ip[4];
	/* Host byte order. */
	__u16 local_port;
	__u16 remote_port;
};

#endif
