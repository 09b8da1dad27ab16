package org.apache.beam.runners.core.construction.resources;

import io.github.classgraph.ClassGraph;
import java.util.ArrayList;
import java.util.List;

/**
 * Replaces Beam's class of this name on the classpath of the job server. Beam's finds all jars,
 * which are then sent to the cluster with each job. This one finds none, since the cluster has them
 * already.
 */
public class ClasspathScanningResourcesDetector implements PipelineResourcesDetector {
  public ClasspathScanningResourcesDetector(ClassGraph classGraph) {}

  @Override
  public List<String> detect(ClassLoader classLoader) {
    return new ArrayList<>();
  }
}
