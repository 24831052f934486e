// node echo_client.js PORT CONNECTIONS BYTES [http]
// Sends known bytes over many connections at once and compares the echo; with
// "http" also talks to the HTTP server on PORT + 1 over kept-alive connections.
const crypto = require("crypto");
const http = require("http");
const net = require("net");
const [port, connections, bytes] = process.argv.slice(2, 5).map(Number);
const withHttp = process.argv[5] === "http";

const fail = (text) => { console.error(text); process.exit(1); };
setTimeout(() => fail("time limit"), 60000).unref();

function data(seed) {
  const key = crypto.createHash("sha256").update(String(seed)).digest();
  return crypto.createCipheriv("aes-256-ctr", key, Buffer.alloc(16)).update(Buffer.alloc(bytes));
}

function one(i) {
  return new Promise((resolve) => {
    const sent = data(i);
    const got = [];
    const sock = net.connect(port, "127.0.0.1", () => {
      for (let pos = 0, n = 1; pos < sent.length; pos += n, n = (n * 3) % 100003 + 1) {
        sock.write(sent.subarray(pos, pos + n));
      }
      sock.end();
    });
    sock.on("data", (c) => got.push(c));
    sock.on("error", (e) => fail(`connection ${i}: ${e}`));
    sock.on("close", () => {
      if (!Buffer.concat(got).equals(sent)) fail(`connection ${i}: bytes differ`);
      resolve();
    });
  });
}

function post(agent, i) {
  return new Promise((resolve) => {
    const body = data(1000 + i);
    const req = http.request({ port: port + 1, host: "127.0.0.1", method: "POST", agent }, (res) => {
      const got = [];
      res.on("data", (c) => got.push(c));
      res.on("end", () => {
        if (!Buffer.concat(got).equals(body)) fail(`request ${i}: bytes differ`);
        resolve();
      });
    });
    req.on("error", (e) => fail(`request ${i}: ${e}`));
    req.end(body);
  });
}

(async () => {
  await Promise.all(Array.from({ length: connections }, (_, i) => one(i)));
  if (withHttp) {
    const agent = new http.Agent({ keepAlive: true, maxSockets: 4 });
    await Promise.all(Array.from({ length: 40 }, (_, i) => post(agent, i)));
    agent.destroy();
  }
  console.log("ok", connections, bytes);
})();
