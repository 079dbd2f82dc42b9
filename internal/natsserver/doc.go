// Package natsserver runs a NATS server with JetStream in this process. It is for `tidings dev`,
// for measurements and for tests. Programs that only connect to a server use package broker, which
// does not link it.
package natsserver
