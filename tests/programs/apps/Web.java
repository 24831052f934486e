import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.util.concurrent.Executors;

/** N bytes at /N: Web PORT. Non-blocking sockets and a selector underneath. */
public class Web {
    public static void main(String[] args) throws Exception {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", Integer.parseInt(args[0])), 128);
        server.setExecutor(Executors.newFixedThreadPool(8));
        server.createContext("/", exchange -> {
            int n = Integer.parseInt(exchange.getRequestURI().getPath().substring(1));
            byte[] pattern = "0123456789abcdef".getBytes();
            byte[] body = new byte[n];
            for (int i = 0; i < n; i++) body[i] = pattern[i % 16];
            exchange.sendResponseHeaders(200, n == 0 ? -1 : n);
            if (n > 0) exchange.getResponseBody().write(body);
            exchange.close();
        });
        Runtime.getRuntime().addShutdownHook(new Thread(() -> server.stop(1)));
        server.start();
    }
}
