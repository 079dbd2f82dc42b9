// Package fleet lists all projections of the system. A new projection needs its folder, its
// migration and its line here. It is for the commands that need every projection.
package fleet
