// N bytes at /N: web.js PORT [WORKERS]. With workers, SIGHUP replaces them one by one, once the last ones are there.
const cluster = require('cluster');
const http = require('http');

const port = Number(process.argv[2]);
const workers = Number(process.argv[3] || 0);

function serve() {
  const server = http.createServer((request, response) => {
    const n = Number(request.url.slice(1));
    response.setHeader('Content-Length', n);
    response.end(Buffer.alloc(n, '0123456789abcdef'));
  });
  server.listen(port, '127.0.0.1');
  return server;
}

if (workers === 0) {
  const server = serve();
  process.on('SIGTERM', () => {
    server.close(() => process.exit(0));
    server.closeIdleConnections();
  });
} else if (cluster.isPrimary) {
  let ending = false;
  for (let i = 0; i < workers; i += 1) cluster.fork();
  cluster.on('exit', () => {
    if (ending && Object.keys(cluster.workers).length === 0) process.exit(0);
  });
  // A worker may end while it is told to.
  cluster.on('fork', (worker) => worker.on('error', () => {}));
  cluster.on('listening', (worker) => ending && worker.disconnect());
  let starting = 0;
  process.on('SIGHUP', () => {
    if (starting > 0 || ending) return;
    for (const old of Object.values(cluster.workers)) {
      starting += 1;
      cluster.fork().once('listening', () => {
        starting -= 1;
        if (old.isConnected()) old.disconnect();
      });
    }
  });
  process.on('SIGTERM', () => {
    ending = true;
    for (const worker of Object.values(cluster.workers)) worker.disconnect();
    // One that had not begun was not told.
    setTimeout(() => Object.values(cluster.workers).forEach((worker) => worker.process.kill()), 3000);
  });
} else {
  serve();
}
