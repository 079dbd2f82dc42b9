// Package services contains the long-running processes of a fleet. The relay's is in package
// relayservice. Each function reads the environment, wires the parts, runs the service until
// SIGTERM and ends the process. Command tidings runs the service by whose name it is called, so one
// binary is enough for the image. It is for the binaries of a fleet and for `tidings dev`.
package services
