#include "port.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>

namespace ddprun {

HeldPort::HeldPort() {
  // On all addresses of both families, as the store will be; IPv4 alone where there is no IPv6.
  for (const int family : {AF_INET6, AF_INET}) {
    socket_ = Fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket_) continue;
    const int on = 1, off = 0;
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6) ::setsockopt(socket_.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    sockaddr_in6 address{};
    address.sin6_family = static_cast<sa_family_t>(family);  // zeros are any address and any port in both families
    socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::bind(socket_.get(), generic, length) != 0 || ::getsockname(socket_.get(), generic, &length) != 0) continue;
    number_ = ntohs(address.sin6_port);  // at the same place in sockaddr_in
    return;
  }
  throw std::system_error(errno, std::generic_category(), "no TCP port can be bound");
}

}  // namespace ddprun
