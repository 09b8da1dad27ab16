package org.apache.beam.sdk.fn.server;

import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import org.apache.beam.model.pipeline.v1.Endpoints;
import org.apache.beam.sdk.fn.channel.SocketAddressFactory;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.BindableService;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.Server;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.ServerInterceptors;
import org.apache.beam.vendor.grpc.v1p54p0.io.grpc.netty.NettyServerBuilder;

/**
 * Replaces Beam's class of this name on the classpath of a runner on this machine. Beam's opens
 * servers, which run any code that they receive, at all addresses. This one opens them at the
 * loopback address, which is the address that Beam gives to its workers in any case.
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
      NettyServerBuilder builder =
          NettyServerBuilder.forAddress(address)
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
}
