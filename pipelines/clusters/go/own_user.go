package jobservices

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
)

// beamjax adds this file to Prism, which runs any code that its clients send. Every user of a
// machine reaches its loopback addresses, so Prism accepts connections of its own user and of root
// only, where the system says to whom a connection belongs (Linux).

type ownUserListener struct{ net.Listener }

// listenForOwnUser listens at an address for clients of the user of this process.
func listenForOwnUser(address string) (net.Listener, error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	return &ownUserListener{listener}, nil
}

// Accept returns the next connection, and closes those of other users.
func (l *ownUserListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil || isOwnUser(conn) {
			return conn, err
		}
		conn.Close()
	}
}

func isOwnUser(conn net.Conn) bool {
	client, isTCP := conn.RemoteAddr().(*net.TCPAddr)
	server, isTCPHere := conn.LocalAddr().(*net.TCPAddr)
	if !isTCP || !isTCPHere {
		return false
	}
	known, found := false, false
	for _, table := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		text, err := os.ReadFile(table)
		if err != nil {
			continue
		}
		known = true
		for _, line := range strings.Split(string(text), "\n")[1:] {
			fields := strings.Fields(line)
			if len(fields) < 10 {
				continue
			}
			local, remote := tableAddress(fields[1]), tableAddress(fields[2])
			if local == nil || remote == nil || local.Port != client.Port ||
				!local.IP.Equal(client.IP) || remote.Port != server.Port {
				continue
			}
			// A closed socket has no inode, and the user of root.
			isOpen := fields[3] == "01" && fields[9] != "0"
			if !isOpen || (fields[7] != "0" && fields[7] != fmt.Sprint(os.Geteuid())) {
				return false
			}
			found = true
		}
	}
	return found || !known
}

// tableAddress parses an address: words in the order of bytes of this machine, and the port.
func tableAddress(text string) *net.TCPAddr {
	host, portText, _ := strings.Cut(text, ":")
	port, err := strconv.ParseUint(portText, 16, 16)
	if err != nil {
		return nil
	}
	address := make(net.IP, len(host)/2)
	for at := 0; at+8 <= len(host); at += 8 {
		word, err := strconv.ParseUint(host[at:at+8], 16, 32)
		if err != nil {
			return nil
		}
		binary.NativeEndian.PutUint32(address[at/2:], uint32(word))
	}
	return &net.TCPAddr{IP: address, Port: int(port)}
}
