// Echo server (raw TCP) and, on the next port, an HTTP server.
// node echo_server.js PORT
const http = require("http");
const net = require("net");
const port = parseInt(process.argv[2], 10);

net.createServer({ allowHalfOpen: true }, (sock) => {
  sock.on("error", () => sock.destroy());
  sock.pipe(sock);
}).listen(port, "127.0.0.1", () => {
  http.createServer((req, res) => {
    const chunks = [];
    req.on("data", (c) => chunks.push(c));
    req.on("end", () => {
      const body = Buffer.concat(chunks);
      res.writeHead(200, { "content-type": "application/octet-stream", "x-length": body.length });
      res.end(req.method === "POST" ? body : `hello ${req.url}\n`);
    });
  }).listen(port + 1, "127.0.0.1", () => console.log("listening"));
});
