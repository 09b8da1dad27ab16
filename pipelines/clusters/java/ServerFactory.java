package org.apache.beam.sdk.fn.server;

import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import org.apache.beam.model.pipeline.v1.Endpoints;
import org.apache.beam.sdk.fn.channel.SocketAddressFactory;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.Attributes;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.BindableService;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.Grpc;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.Metadata;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.Server;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.ServerCall;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.ServerCallHandler;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.ServerInterceptor;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.ServerInterceptors;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.ServerTransportFilter;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.Status;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.netty.NettyServerBuilder;

/**
 * Replaces Beam's class of this name on the classpath of a runner on this machine. Beam's opens
 * servers, which run any code that they receive, at all addresses. This one opens them at the
 * loopback address, which is the address that Beam gives to its workers in any case. As every user
 * of a machine reaches that address, these servers answer only the user of this process, and root,
 * where the system says to whom a connection belongs (Linux).
 */
public abstract class ServerFactory {
  private static final int KEEP_ALIVE_SECONDS = 20;

  public static ServerFactory createDefault() {
    return createWithPortSupplier(() -> 0);
  }

  public static ServerFactory createWithUrlFactory(UrlFactory urlFactory) {
    return createWithUrlFactoryAndPortSupplier(urlFactory, () -> 0);
  }

  public static ServerFactory createWithPortSupplier(Supplier<Integer> portSupplier) {
    return createWithUrlFactoryAndPortSupplier(UrlFactory.createDefault(), portSupplier);
  }

  public static ServerFactory createWithUrlFactoryAndPortSupplier(
      UrlFactory urlFactory, Supplier<Integer> portSupplier) {
    return new Loopback(urlFactory, portSupplier);
  }

  /** Opens a server at a free port, and writes the address into the descriptor. */
  public abstract Server allocateAddressAndCreate(
      List<BindableService> services, Endpoints.ApiServiceDescriptor.Builder descriptor)
      throws IOException;

  /** Opens a server at the port of a descriptor. */
  public abstract Server create(
      List<BindableService> services, Endpoints.ApiServiceDescriptor descriptor) throws IOException;

  /** Makes the URL of a server, which workers get. */
  public interface UrlFactory {
    String createUrl(String address, int port);

    static UrlFactory createDefault() {
      return (address, port) -> address + ":" + port;
    }
  }

  private static final class Loopback extends ServerFactory {
    private final UrlFactory urlFactory;
    private final Supplier<Integer> portSupplier;

    Loopback(UrlFactory urlFactory, Supplier<Integer> portSupplier) {
      this.urlFactory = urlFactory;
      this.portSupplier = portSupplier;
    }

    @Override
    public Server allocateAddressAndCreate(
        List<BindableService> services, Endpoints.ApiServiceDescriptor.Builder descriptor)
        throws IOException {
      InetSocketAddress address = loopback(portSupplier.get());
      Server server = start(services, address);
      descriptor.setUrl(urlFactory.createUrl(address.getHostName(), server.getPort()));
      return server;
    }

    @Override
    public Server create(
        List<BindableService> services, Endpoints.ApiServiceDescriptor descriptor)
        throws IOException {
      InetSocketAddress named =
          (InetSocketAddress) SocketAddressFactory.createFrom(descriptor.getUrl());
      return start(services, loopback(named.getPort()));
    }

    private static InetSocketAddress loopback(int port) {
      return new InetSocketAddress(InetAddress.getLoopbackAddress(), port);
    }

    private static Server start(List<BindableService> services, InetSocketAddress address)
        throws IOException {
      OwnUser ownUser = new OwnUser();
      NettyServerBuilder builder =
          NettyServerBuilder.forAddress(address)
              .addTransportFilter(ownUser)
              .intercept(ownUser)
              .maxInboundMessageSize(Integer.MAX_VALUE)
              .permitKeepAliveTime(KEEP_ALIVE_SECONDS, TimeUnit.SECONDS);
      for (BindableService service : services) {
        builder.addService(
            ServerInterceptors.intercept(
                service, GrpcContextHeaderAccessorProvider.interceptor()));
      }
      return builder.build().start();
    }
  }

  /** Looks up the user of each connection, once, and refuses the calls of others. */
  private static final class OwnUser extends ServerTransportFilter implements ServerInterceptor {
    private static final Attributes.Key<Boolean> IS_OWN = Attributes.Key.create("is-own-user");
    private static final String ESTABLISHED = "01";

    @Override
    public Attributes transportReady(Attributes attributes) {
      boolean isOwn;
      try {
        isOwn =
            isOwn(
                attributes.get(Grpc.TRANSPORT_ATTR_REMOTE_ADDR),
                attributes.get(Grpc.TRANSPORT_ATTR_LOCAL_ADDR));
      } catch (IOException | RuntimeException error) {
        isOwn = false;
      }
      return attributes.toBuilder().set(IS_OWN, isOwn).build();
    }

    @Override
    public <A, B> ServerCall.Listener<A> interceptCall(
        ServerCall<A, B> call, Metadata headers, ServerCallHandler<A, B> next) {
      if (Boolean.TRUE.equals(call.getAttributes().get(IS_OWN))) {
        return next.startCall(call, headers);
      }
      String text = "this server answers its own user only";
      call.close(Status.PERMISSION_DENIED.withDescription(text), new Metadata());
      return new ServerCall.Listener<A>() {};
    }

    private static boolean isOwn(SocketAddress client, SocketAddress server) throws IOException {
      List<String> lines = new ArrayList<>();
      for (String table : new String[] {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
        Path path = Paths.get(table);
        if (Files.exists(path)) {
          lines.addAll(Files.readAllLines(path));
        }
      }
      if (lines.isEmpty()) {
        return true; // not Linux
      }
      boolean found = false;
      for (String line : lines) {
        String[] fields = line.trim().split("\\s+");
        if (!fields[0].endsWith(":")
            || !address(fields[1]).equals(client)
            || address(fields[2]).getPort() != ((InetSocketAddress) server).getPort()) {
          continue;
        }
        // A closed socket has no inode, and the user of root.
        boolean isOpen = fields[3].equals(ESTABLISHED) && !fields[9].equals("0");
        if (!isOpen || !(fields[7].equals("0") || fields[7].equals(user()))) {
          return false;
        }
        found = true;
      }
      return found;
    }

    /** An address of the table: words in the order of bytes of this machine, and the port. */
    private static InetSocketAddress address(String text) throws IOException {
      String[] parts = text.split(":");
      byte[] bytes = new byte[parts[0].length() / 2];
      boolean isLittle = ByteOrder.nativeOrder() == ByteOrder.LITTLE_ENDIAN;
      for (int i = 0; i < bytes.length; i++) {
        int at = isLittle ? i - i % 4 + 3 - i % 4 : i;
        bytes[at] = (byte) Integer.parseInt(parts[0].substring(2 * i, 2 * i + 2), 16);
      }
      return new InetSocketAddress(
          InetAddress.getByAddress(bytes), Integer.parseInt(parts[1], 16));
    }

    private static String user() throws IOException {
      for (String line : Files.readAllLines(Paths.get("/proc/self/status"))) {
        if (line.startsWith("Uid:")) {
          return line.split("\\s+")[2]; // the effective one
        }
      }
      throw new IOException("/proc/self/status: found no user");
    }
  }
}
