// Package proxy disturbs the connections to a server: it delays, stalls, loses or cuts them. It is
// for the tests, and for the measurements that need a network between a process and its servers.
//
// A delay is that of a wire: each chunk arrives a fixed time after it was sent, and the chunks
// behind it do not wait for its arrival. So the rate is that of the machine.
package proxy
